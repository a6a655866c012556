"""Transformer, value model, cache, tokenizers, conversation formats, and public weights."""

from sao_jax.models.pretrained import load_pretrained, save_pretrained

__all__ = ['load_pretrained', 'save_pretrained']
