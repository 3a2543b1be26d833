"""Generation engines behind one protocol: token ids in, token ids with logprobs out.

base            the `Engine` protocol that rollouts call, its requests and its generations
replicas        load balancing and back-off over several servers or engine processes

local/          `HFEngine`: decodes in this process with a transformers model, on a CPU or one GPU
    scheduler       which rows are decoded next, on one thread
    rows            the host-side record of rows being decoded
    padded, kv_padded   keys and values in one padded block per batch: every model, every device
    slots, kv_pool      keys and values in a preallocated pool, decode steps as CUDA graphs: GPU
    sampling        the exact rule by which a token is drawn
    kernels/        Triton kernels of the decode step

hosted/         `HostedEngine`: the hf engine in processes of its own
    process, app    the engine process and its HTTP routes
    engine, client  the trainer's side: placement, restarts, connections
    messages        the binary frames between the two
    weights         delivery of new weights to engine processes

servers/        `RemoteEngine`: vLLM, SGLang and OpenAI-compatible servers
    dialects        the wire format of each kind of server
    continuation    one generation assembled from several HTTP requests
    engine, weights, gpu_handover   balancing, retries, delivery of new weights
    vllm, vllm_process, vllm_proxy  vLLM servers that we start, monitor and restart
    vllm_side/      code that runs inside vLLM's own interpreter
"""
