"""Hidden states × head → loss, without ever holding [tokens × vocabulary].

chunks        the loop over chunks of tokens and the autograd Function around it
torch_rows    one chunk with plain torch operations, on any device
triton_rows   one chunk with the kernels of `kernels`, on a GPU (or under Triton's interpreter)
slopes        closed-form gradients of the divergences, shared by both
"""
