"""What processes say to one another, all of it: run by `torch.distributed.run`, prints its results.

`python -m torch.distributed.run --standalone --nproc-per-node 2 collectives.py FOLDER`: each rank
writes what it has to a file of its own, for a run without us to be compared with.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

out = {}


def mine(factor=1.0):
    return (torch.arange(6.0) + 1) * (dist.get_rank() + 1) * factor + 0


def say(rank, count):
    out["all_reduce"] = x = mine()
    dist.all_reduce(x)
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    del work  # nobody looks while the bytes are held
    out["async"] = x + 0
    out["a part"] = x = mine()
    dist.all_reduce(x[2:5])
    for is_async in (False, True):
        x = torch.diag(mine()[rank : rank + 3]).to_sparse()
        work = dist.all_reduce(x, async_op=is_async)
        if is_async:
            work.wait()
        out[f"sparse {is_async}"] = torch.cat([x.indices(), x.values()[None]]) + x._version
    try:
        dist.broadcast(x, 1)
    except NotImplementedError:
        out["no sparse broadcast"] = mine()
    x = mine()
    dist.broadcast(x, 1)
    out["broadcast"] = x + 0
    parts = [torch.zeros(6) for _ in range(count)]
    dist.all_gather(parts, mine())
    out["all_gather"] = torch.cat(parts)
    whole = torch.zeros(6 * count)
    dist.all_gather_into_tensor(whole, mine())
    out["all_gather_into_tensor"] = whole + 0
    parts = [torch.zeros(6) for _ in range(count)] if rank == 0 else None
    dist.gather(mine(), parts, 0)
    out["gather"] = torch.cat(parts or [torch.zeros(1)])
    x = torch.zeros(6)
    dist.scatter(x, [mine(), mine(2.0)] if rank == 0 else None, 0)
    out["scatter"] = x + 0
    x = torch.zeros(6)
    if rank == 0:
        dist.send(mine(), 1)
    else:
        dist.recv(x, 0)
    out["recv"] = x + 0
    said = [None] * count
    dist.all_gather_object(said, {"x": mine()})
    out["objects"] = torch.cat([one["x"] for one in said])
    out["functional"] = functional.all_reduce(mine(), "sum", dist.group.WORLD) + 0
    dist.barrier()


def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        loss = parallel(torch.randn(5, 8, generator=draws)).pow(2).mean()
        loss.backward()
        optimizer.step()
        out[f"loss {step}"] = loss.detach() + 0
    out["weight"] = model[0].weight.detach() + 0
    return "ref" if hasattr(model[0].weight, "proxyInfo") else "plain"


def train_sparse(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor([[rank, 3], [3, 5 + step]])).pow(2).mean().backward()
        out[f"sparse gradient {step}"] = model[0].weight.grad.to_dense() + 0
        optimizer.step()
    out["table"] = model[0].weight.detach() + 0


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2)))


def steps(name, model, draws):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        loss = model(torch.randn(5, 8, generator=draws)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out[f"{name}, loss {step}"] = loss.detach() + 0
    out[f"{name}, weight"] = model[0][0].weight.full_tensor().detach() + 0


def shard(rank, count):
    mesh = init_device_mesh("cpu", (count,))
    sharded = layers()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    steps("fully_shard", fully_shard(sharded, mesh=mesh), torch.Generator().manual_seed(rank))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallel = layers()
    for layer in parallel:
        parallelize_module(layer, mesh, plan)
    steps("tensor parallel", parallel, torch.Generator().manual_seed(0))
    x = distribute_tensor(mine().reshape(2, 3), mesh, [Shard(0)])
    out["DTensor"] = (x * 2 + 1).redistribute(mesh, [Replicate()]).to_local() + 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say(rank, dist.get_world_size())
    kind = train(rank)
    train_sparse(rank)
    shard(rank, dist.get_world_size())
    results = {name: tensor.tolist() for name, tensor in out.items()}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({"kind": kind, "out": results}))
    dist.barrier()  # nobody takes the group away while the other one is in it
    dist.destroy_process_group()
