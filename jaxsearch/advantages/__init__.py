"""How trajectories, segments and steps are credited: pure functions of arrays.

They take and return arrays, work under jit, vmap and grad, compute in float32 whatever comes in, know ragged
data only as masks, and import nothing but jax. The formulas of the five systems stand side by side in
docs/credit.md.
"""

# Most functions have the name of their module. Importing all modules here, before anything else can, settles
# it: the attributes of this package are the functions, since Python binds a submodule's name only when it is
# loaded.
from jaxsearch.advantages.depth_greedy import advance_phase, depth_greedy, depth_plan, select_by_depth
from jaxsearch.advantages.gae import gae, smdp_td, whiten
from jaxsearch.advantages.group_relative import group_relative, step_reward, truncated_step
from jaxsearch.advantages.refinement import hybrid_reward, refinement_gain

__all__ = ['advance_phase', 'depth_greedy', 'depth_plan', 'gae', 'group_relative', 'hybrid_reward',
           'refinement_gain', 'select_by_depth', 'smdp_td', 'step_reward', 'truncated_step', 'whiten']
