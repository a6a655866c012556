"""Records rotary frequencies of transformers, bit for bit, in rope_frequencies.json. Needs torch and transformers."""

import json
import pathlib

import numpy as np
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

NAMES = {
    'factor': 'factor', 'low_freq_factor': 'low_frequency', 'high_freq_factor': 'high_frequency', 'attention_factor': 'attention_factor',
    'original_max_position_embeddings': 'original_length', 'beta_fast': 'beta_fast', 'beta_slow': 'beta_slow', 'mscale': 'mscale',
    'mscale_all_dim': 'mscale_all_dim', 'truncate': 'truncate'}
LLAMA3 = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=32768)
CASES = [
    *[(dim, theta, dict(rope_type='default')) for dim in (8, 32, 64, 80, 128, 256) for theta in (1e4, 1e5, 5e5, 1e6, 5e6, 1e7, 12345.0)],
    (128, 1e4, dict(rope_type='linear', factor=4.0)), (64, 1e6, dict(rope_type='linear', factor=3.0)),
    (128, 5e5, LLAMA3), (64, 5e5, dict(LLAMA3, factor=32.0)), (8, 5e5, LLAMA3), (128, 5e5, dict(LLAMA3, high_freq_factor=5.0)),
    (128, 1e6, YARN), (64, 1e6, dict(YARN, factor=2.5)), (16, 1e6, dict(YARN, original_max_position_embeddings=8192)),
    (64, 1e4, dict(YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=4096)),
    (128, 1e6, dict(YARN, beta_fast=16.0, beta_slow=2.0, truncate=False)), (128, 1e6, dict(YARN, attention_factor=1.25))]


def main() -> None:
  found = []
  for dim, theta, rope in CASES:
    config = transformers.LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=131072,
        rope_parameters=dict(rope, rope_theta=theta))
    embedding = LlamaRotaryEmbedding(config)
    found.append({
        'dim': dim, 'theta': theta, 'rope': {'kind': rope['rope_type'], **{NAMES[n]: v for n, v in rope.items() if n in NAMES}},
        'attention_factor': float(embedding.attention_scaling),
        'bits': [f'{int(x):08x}' for x in embedding.inv_freq.numpy().astype(np.float32).view(np.uint32)]})
  path = pathlib.Path(__file__).parent / 'rope_frequencies.json'
  path.write_text('[\n' + ',\n'.join(json.dumps(x) for x in found) + '\n]\n')


if __name__ == '__main__':
  main()
