"""Models larger than the accelerator's budget: ours and what people use today, in one table.

    python -m benchmarks.small_gpu --device cuda:0 --scale full --resume --minutes 8.5
    python -m benchmarks.small_gpu --dry

`docs/benchmarks.md` says how to run it on a rented machine and what each column means.

One process per *seat*: one contestant, one model, one cap. It loads the weights with transformers'
own code from files that all share, and measures its *cells*, one per workload. What is measured is
kept in a state file after each seat, so that a run may be broken off and gone on with.

    scales        sizes of the models and of the work, caps
    weights       seeded weights, made and saved once; loading
    denoiser      a diffusion transformer
    workloads     the five programs; they know nothing of whose tensors they use
    contestants   ours, plain torch, accelerate, diffusers: how each brings a model to the device
    machine       the device: clock, cap, what its allocator counts; real, simulated, or the host
    probe         what the link, the memory and the arithmetic units reach
    bound         the least time a step can take (THEORY 3.1)
    seat          what runs in a seat's process
    processes     starting such processes, and what became of them
    plan          which seats in which order; the state file
    compare       results against the reference, shares of the bound, targets
    table         the page
    calls         `make gpu`
"""
