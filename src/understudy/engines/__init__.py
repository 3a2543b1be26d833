"""Generation behind one small protocol.

base.Engine       what a rollout sees: tokens in, tokens with logprobs and weight versions out
hf.HFEngine       in-process over a transformers model: the oracle, CPU or one GPU
sampling          the exact rule by which a token is drawn; the other engines follow it as far as their servers can
"""
