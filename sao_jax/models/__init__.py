"""Transformer, value model, cache, tokenizers, conversation formats, and public weights."""

from typing import Any

__all__ = ['load_pretrained', 'save_pretrained']


def __getattr__(name: str) -> Any:  # Imported when first used: tokenizers and templates need no JAX.
  if name in __all__:
    from sao_jax.models import pretrained

    return getattr(pretrained, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
