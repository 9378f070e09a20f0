"""Two workers that call one another by `torch.distributed.rpc`: `rpc_workers.py PORT [RANK]`.

The first one prints what it got, a line for each call, for a run without us to be
compared with.
"""

import subprocess
import sys

import torch
import torch.distributed.autograd as over_workers
import torch.distributed.rpc as rpc
from torch import nn

kept = []


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor):
    return a * b


def fetched(rref):
    return rref.to_here() + 1


def parts(held):
    held["x"].add_(1)
    return {"all": held["x"] * 2, "some": held["x"][1:, ::2], "weight": nn.Parameter(held["x"])}


def made():
    return rpc.RRef(torch.full((3,), 2.0))


def keep(rref):
    kept.append(rref)


def give_back():
    return kept.pop()


@rpc.functions.async_execution
def sent_on(x):
    return rpc.rpc_async("w0", torch.add, (x, 1)).then(lambda future: future.wait() * 2)


def total(x):
    return (x * 3).sum()


def call():
    """Call the other worker in each way that there is, and yield what comes."""
    x = torch.arange(16.0).view(4, 4)
    yield rpc.rpc_sync("w1", torch.add, (x[1:, ::3], x.t()[1:, ::3]), {"alpha": 2})
    yield rpc.rpc_async("w1", torch.cat, ([x, x], 1)).wait()
    yield rpc.remote("w1", torch.mul, (x, x)).to_here()
    yield rpc.rpc_sync("w1", scripted, (x, x))
    yield rpc.remote("w1", scripted, (x, x)).to_here()
    yield from rpc.rpc_sync("w1", parts, ({"x": x},)).values()
    yield x
    yield rpc.rpc_sync("w1", sent_on, (x,))
    # RRefs
    mine, yours = rpc.RRef(x), rpc.rpc_sync("w1", made)
    yield rpc.rpc_sync("w1", fetched, (mine,))
    yield yours.to_here()
    yield yours.rpc_sync().sum()
    yield rpc.rpc_sync("w1", fetched, (yours,))
    rpc.rpc_sync("w1", keep, (mine,))
    back = rpc.rpc_sync("w1", give_back)
    assert back.local_value() is x
    yield rpc.rpc_sync("w1", fetched, (back,))
    # Gradients
    w = torch.ones(4, 4, requires_grad=True)
    for loss in (
        lambda: (x * rpc.rpc_sync("w1", torch.mm, (x, w))).sum(),
        lambda: (x * rpc.remote("w1", scripted, (x, w * 2)).to_here()).sum(),
        lambda: (x * rpc.remote("w0", torch.mul, (x, w)).to_here()).sum(),
        lambda: rpc.rpc_sync("w1", total, (w * x,)),
        lambda: (x * rpc.rpc_sync("w1", sent_on, (w,))).sum(),
    ):
        with over_workers.context() as context:
            over_workers.backward(context, [loss()])
            yield over_workers.get_gradients(context)[w]
    with over_workers.context() as context:
        rpc.remote("w1", total, (w,)).backward(context)
        yield over_workers.get_gradients(context)[w]
    yield refused(mine)


@torch.jit.script
def of_rref(rref: torch.distributed.rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here()


def refused(mine):
    try:
        return rpc.rpc_sync("w1", of_rref, (mine,)).sum()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(port, rank=0):
    """Be one of them; the first one starts the other."""
    other = None if rank else subprocess.Popen([sys.executable, *sys.orig_argv[1:], "1"])
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60
        ),
    )
    if rank == 0:
        for value in call():
            told = value.tolist() if isinstance(value, torch.Tensor) else value
            sys.stdout.write(f"{told}\n")
    rpc.shutdown()
    return other.wait() if other else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
