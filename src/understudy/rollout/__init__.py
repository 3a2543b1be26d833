"""From a dataset row to a trajectory: prompts, rendering, agent loops, tools and rewards.

sources.py, dataset.py  read and check rows;  cursor.py  the resumable order in which they are issued
seeds.py     seeds as a pure function of (run, epoch, prompt, session, turn)
render.py    messages to token ids, once per turn boundary
loading.py   loads user code named as "module:object";  timing.py  seconds per phase of a rollout
agents/      the loop protocol (agent.py), its registry, and the loops: single_turn, tool_loop, verifiers_env;
             conversations.py is for agents that work with messages instead of tokens
tools/       tools that a model calls; they run in jailed child processes
rewards/     task rewards as plain callables: builtin (exact match, GSM8K), math_reward, judge
workers/     agent loops in worker processes
"""
