"""Generation behind one small protocol.

base.Engine       what a rollout sees: tokens in, tokens with logprobs and weight versions out
hf.HFEngine       in this process, over a transformers model: the oracle, CPU or one GPU
                  schedule    who is written next           writing    rows as the host sees them
                  padded, kv  keys and values in one block  slots      in a pool, steps as CUDA graphs
                  sampling    the exact rule by which a token is drawn
                  lean_forward  plain decoders on a CPU  prefix_tree  rows that begin alike, read once
pretrained        loads a model, for trainers and teachers too   rotary_border  lengths that may not share a forward pass
hosted            the hf engine in processes of its own: host is such a process, host_wire what both sides say
                  far, hosted_far, compositions, deposits   batches by name, whose tokens others bring to the process
remote            servers: RemoteEngine over a dialect (dialects: vllm, sglang, openai) and replicas (balance, health);
                  delivery    new weights for them   gpu_handover  on the trainer's own GPU, by a copy on the device
                  pieces      one generation by a server, whoever asks   remote_far, visits   where rollout workers ask
vllm              vLLM servers we start, watch and restart; vllm_host is the process around one, vllm_side its worker part
"""
