"""From a dataset row to what the student wrote: prompts, rendering, agent loops, tools and rewards.

sources, dataset   where rows come from; checked rows;  cursor  the resumable order in which they are issued
seeds              randomness as a pure function of (run, epoch, prompt, session, turn)
render             messages to token ids, once per turn boundary
agent, loops       the loop protocol, the loops there are, and loading a user's own
single_turn        one question, one answer
tool_loop, tools   the model calls tools, which run outside our process
conversations      for agents that know messages only;  verifiers_env  environments of that package
workers, worker    loops in processes of their own;  timing  where a rollout's time goes
rewards            task rewards as plain callables; reward (exact match, GSM8K), math_reward and judge ship
"""
