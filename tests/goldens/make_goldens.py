"""Makes the tiny models in this folder with Hugging Face transformers: weights, settings and logits. Needs only torch, transformers, numpy.

    python3 -m venv /tmp/parity && /tmp/parity/bin/pip install -r requirements/parity.txt safetensors numpy
    /tmp/parity/bin/python tests/goldens/make_goldens.py

Each of tiny_llama, tiny_qwen2 and tiny_qwen3 is a folder as transformers saves it, with 2 layers of width 32 and random weights (norms and
biases too), and `outputs.npz`: tokens i32[4, 12], positions i32[4, 12] (rows start at 0, 1 and 1000; the last one jumps from 1 to 1000)
and float32 logits [4, 12, 64].
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None, pad_token_id=None)
MODELS = {
    'tiny_llama': (transformers.LlamaConfig, dict(tie_word_embeddings=False, rope_theta=10_000.0, rms_norm_eps=1e-5)),
    'tiny_qwen2': (transformers.Qwen2Config, dict(tie_word_embeddings=True, rope_theta=1_000_000.0)),
    'tiny_qwen3': (transformers.Qwen3Config, dict(tie_word_embeddings=False, rope_theta=1_000_000.0, head_dim=16)),
}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
  """Weights that leave no term without effect: norms around 1, biases around 0, projections of unit gain."""
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if 'norm' in name:
        weight.copy_(1 + 0.3 * noise)
      elif name.endswith('bias'):
        weight.copy_(0.5 * noise)
      else:
        weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5))


def main() -> None:
  for seed, (name, (config_class, changes)) in enumerate(MODELS.items()):
    config = config_class(**{**SHAPE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation='eager').eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    tokens = torch.randint(0, SHAPE['vocab_size'], (4, 12), generator=generator)
    positions = torch.tensor([[0], [1], [1000], [0]]) + torch.arange(12)[None]
    positions[3, 2:] += 998
    with torch.no_grad():
      logits = model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / 'generation_config.json').unlink(missing_ok=True)
    np.savez(
        folder / 'outputs.npz', tokens=tokens.numpy().astype(np.int32), positions=positions.numpy().astype(np.int32),
        logits=logits.numpy(), versions=np.array(f'transformers {transformers.__version__}, torch {torch.__version__}'))
    print(name, 'largest logit', float(logits.abs().max()))


if __name__ == '__main__':
  main()
