"""The maths of learning from a teacher: pure functions on tensors, and fused versions of them.

describe      names, formulas and refusals; importable without torch
reduce        token weights over the global batch
divergences   f-divergences between two distributions;  tails  the mass outside K candidates
estimators    single-sample estimators k1, k2, k3 …
policy        clipped policy gradients;  advantages  rewards → advantages;  value  the critic's loss
objective     `Objective`: all of the above behind one call
fused         hidden states × head → loss, without ever holding [tokens × vocabulary]
"""
