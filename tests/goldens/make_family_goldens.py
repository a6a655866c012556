"""Makes tiny models of every family with Hugging Face transformers, and their logits. Needs only torch, transformers, numpy.

    python3 -m venv /tmp/parity && /tmp/parity/bin/pip install -r requirements/parity.txt safetensors numpy
    /tmp/parity/bin/python tests/goldens/make_family_goldens.py [name ...]

Each folder `family_*` is a random model as transformers saves it, with weights that leave no term without effect, and `outputs.npz`:

    long           u8[T], one row of 8192 tokens, or 32768 where rotary angles are scaled
    long_logits    f32[n, 64] at `positions` of it: 0, 1, 1000, 8191 and 32767
    short          u8[2, 48], two rows, and their logits f32[2, 48, 64]
    chosen         u16[3, 256, 8], of glm_moe_dsa: which keys every 32nd query of `long` sees in the layers with an index of their own
"""

import contextlib
import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=8192, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
LLAMA3 = dict(
    rope_type='llama3', rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type='yarn', rope_theta=1_000_000.0, factor=4.0, original_max_position_embeddings=8192)
LATENT = dict(
    num_hidden_layers=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, n_group=2, topk_group=1,
    first_k_dense_replace=1, routed_scaling_factor=2.5, index_topk=32, index_head_dim=16, index_n_heads=8,
    indexer_types=['full', 'full', 'shared', 'full'])
MODELS = {
    'llama3': (transformers.LlamaConfig, dict(rope_parameters=LLAMA3, max_position_embeddings=65536)),
    'qwen2': (transformers.Qwen2Config, dict(rope_parameters=dict(rope_type='default', rope_theta=1e6), tie_word_embeddings=True)),
    'qwen3': (transformers.Qwen3Config, dict(rope_parameters=dict(rope_type='default', rope_theta=1e6), head_dim=16)),
    'qwen3_yarn': (transformers.Qwen3Config, dict(rope_parameters=YARN, head_dim=16, max_position_embeddings=32768)),
    'qwen3_moe': (transformers.Qwen3MoeConfig, dict(
        rope_parameters=dict(rope_type='default', rope_theta=1e6), head_dim=16, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1])),
    'glm4_moe': (transformers.Glm4MoeConfig, dict(
        rope_parameters=dict(rope_type='default', rope_theta=1e6, partial_rotary_factor=0.5), head_dim=16, num_hidden_layers=3,
        n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=12, n_shared_experts=1, n_group=4, topk_group=2,
        first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, attention_bias=True, use_qk_norm=True)),
    # With few heads it happens that all weights of a query are negative, and the best score is the 0 of every key that no head likes. Which
    # of equal keys transformers then takes follows from the order of its heap.
    'glm_moe_dsa': (transformers.GlmMoeDsaConfig, dict(
        LATENT, index_topk=8, index_n_heads=16, rope_parameters=dict(rope_type='default', rope_theta=1e6))),
    'glm_moe_dsa_yarn': (transformers.GlmMoeDsaConfig, dict(
        LATENT, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0), max_position_embeddings=32768)),
}
SEEN = list(range(31, 8192, 32))  # Queries whose choice of keys is recorded.
LONG = {'llama3': 32768, 'qwen3_yarn': 32768}  # Others: 8192.
# Others: their number. The index chooses among thousands of keys in each of 8192 queries and three layers. Where the last key that is chosen
# and the first that is not have equal scores to round-off, transformers in float32 does not agree with itself in float64. With this seed
# the smallest such gap, over all queries, is 6e-7, 4e-6 and 4e-6 of a query's largest score in the three layers, and none is 0.
SEEDS = {'glm_moe_dsa': 1}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
  """Weights that leave no term without effect: norms around 1, biases around 0, projections of unit gain."""
  with torch.no_grad():
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
      if 'inv_freq' in name:
        continue
      noise = torch.randn(weight.shape, generator=generator)
      if 'bias' in name:
        weight.copy_(0.3 * noise)
      elif 'norm' in name:
        weight.copy_(1 + 0.3 * noise)
      else:
        weight.copy_(noise * (1.5 / weight.shape[-1] ** 0.5))


@contextlib.contextmanager
def chosen_keys(name: str):
  """What the sparse index of each layer that has one chooses meanwhile: {'chosen': u16[layers, n, k] for queries SEEN of a row}."""
  found, chosen = {}, []
  if name != 'glm_moe_dsa':
    yield found
    return
  kind = transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaIndexer
  hook = torch.nn.modules.module.register_module_forward_hook(
      lambda module, _, out: chosen.append(out[0, SEEN].numpy()) if isinstance(module, kind) else None)
  yield found
  hook.remove()
  found['chosen'] = np.sort(np.stack(chosen), axis=-1).astype(np.uint16)


def make(name: str, seed: int) -> None:
  config_class, changes = MODELS[name]
  model = transformers.AutoModelForCausalLM.from_config(
      config_class(**{**SHAPE, **changes}), dtype=torch.float32, attn_implementation='sdpa').eval()
  generator = torch.Generator().manual_seed(seed)
  randomize(model, generator)
  size = LONG.get(name, 8192)
  long, short = torch.randint(0, 64, (1, size), generator=generator), torch.randint(0, 64, (2, 48), generator=generator)
  positions = [p for p in (0, 1, 1000, 8191, 32767) if p < size]
  with chosen_keys(name) as chosen, torch.no_grad():
    long_logits = model(long, use_cache=False, logits_to_keep=torch.tensor(positions)).logits[0]
  with torch.no_grad():
    short_logits = model(short, use_cache=False).logits
  folder = HERE / f'family_{name}'
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink(missing_ok=True)
  np.savez(
      folder / 'outputs.npz', long=long[0].numpy().astype(np.uint8), positions=np.array(positions, np.int32),
      long_logits=long_logits.numpy(), short=short.numpy().astype(np.uint8), logits=short_logits.numpy(),
      versions=np.array(f'transformers {transformers.__version__}, torch {torch.__version__}'), **chosen)
  print(name, 'largest logit', float(short_logits.abs().max()), float(long_logits.abs().max()), flush=True)


def main() -> None:
  for seed, name in enumerate(MODELS):
    if name in sys.argv[1:] or len(sys.argv) == 1:
      make(name, SEEDS.get(name, seed))


if __name__ == '__main__':
  main()
