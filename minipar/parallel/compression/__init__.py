"""Compression: send less than the gradients, and remember what was left out.

Idea.   A gradient is noisy: 8 bits, one bit, one entry in a hundred or a matrix of rank 4 will do,
        if the part that a step leaves out (the *residue*) is added to the gradient of the next
        step. Then nothing is lost; it only comes later: *error feedback*.
Math.   On rank r, with gradient g_r and residue e_r: v_r = w g_r + e_r (w = 1/n to average, else
        1), and s_r of it is sent; e_r <- v_r - s_r; every rank gets g = sum_r s_r. Invariant:
        g + sum_r e_r after the step = sum_r (w g_r + e_r before it), whatever the compressor.
Shapes. Buckets of N numbers, P@dp -> R@dp; bit for bit the same result on all ranks.
Comms.  Bytes that a rank sends per bucket of N numbers, n ranks (c: as a fraction of 4 N bytes):

          uncompressed   2 (n-1)/n 4 N
          codec          2 (n-1)/n c 4 N   c = 1/2 fp16, bf16; 1/4 + 1/b int8; 1/32 + 1/b sign
          top-k          (n-1) 8 k         k = fraction N: a number and its place
          PowerSGD       2 (n-1)/n 4 (r sum (rows + columns) + what is no matrix worth it)

        with one scale of 4 bytes per block of b numbers.
Sums.   A link can add numbers, but not codes: int8 would overflow, and blocks differ in scale.
        So a codec either gathers all vectors (n-1 of them arrive), or each rank gets one chunk
        from every rank, decompresses, adds in float32, compresses the sum and sends the sum to
        all: 2 (n-1)/n vectors, one rounding more. On two ranks both cost the same; they gather.
        PowerSGD sends numbers that are linear in the gradient: an all-reduce adds them.
Memory. One residue of 4 bytes per parameter with feedback; a pair of thin matrices for PowerSGD.
Costs you. Accuracy: see each class. Time to compress, in a thread beside backward. A loss scale
        must not change from step to step. A checkpoint holds no residues. Use compression over dp
        alone: a thread launches the calls, and NCCL wants one order among the calls of all groups.
Source. Error feedback: Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
        QSGD: 1610.02132. Sign: 1802.04434. Top-k: 1712.01887 (without its momentum correction).
        PowerSGD: 1905.13727, algorithm 1. Feedback after the sum: 1905.05957.
In torch: `torch.distributed.algorithms.ddp_comm_hooks`.
Proved by tests/parallel/test_compression.py and tests/law/test_law.py.

Use: ``ddp.apply(model, mesh.dp, reduce=Compressed(TopK(0.01)))``.
"""
