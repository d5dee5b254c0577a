"""The road from the N x N matrix to FlashAttention, each step runnable, its traffic through device memory predicted and counted.

The steps, each a file: `softmax_rows` (three rungs of the softmax ladder), `standard` (S and P materialised), `fa1` (outer loop over
keys, state in device memory), `fa2` (outer loop over queries, state on chip), `split_dim` (head dimensions that no tile can hold) and
`block_sparse` (tiles left out). Each is written twice: here in plain torch against a `traffic.DeviceMemory` that counts every tile
it hands out or takes back, and in `lab.triton` as a kernel of the same loops.

`predict` says in closed form what they must move, `run` puts prediction beside measurement, `trace` draws one small case step by step.
"""
