"""The method's formulas: arrays and scalars in, arrays and `Stat`s out; no model, settings object or thread.

`ADVANTAGES` and `OBJECTIVES` name what an update is composed of: any estimator goes with any objective.
"""

from sao_jax.algorithms.advantages import (
    ADVANTAGES, length_adaptive_lambda, num_actions, place_outcome_reward, reinforce_batch_centred, rollouts, skip_observation_gae,
)
from sao_jax.algorithms.losses import OBJECTIVES, dis_policy_loss, ppo_clip_policy_loss, supervised_loss
from sao_jax.algorithms.values import explained_variance, squared_error_value_loss

__all__ = [
    'ADVANTAGES', 'OBJECTIVES', 'dis_policy_loss', 'explained_variance', 'length_adaptive_lambda', 'num_actions', 'place_outcome_reward',
    'ppo_clip_policy_loss', 'reinforce_batch_centred', 'rollouts', 'skip_observation_gae', 'squared_error_value_loss', 'supervised_loss',
]
