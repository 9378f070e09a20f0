"""The first steps, line by line. Run it, and read its output beside this text.

What to watch: `hi` is the same object throughout; where its bytes are changes, what it prints
does not; a product too large for the budget still comes out, computed on the host, and the report
says so.
"""

import argparse
import warnings

import torchTensorRef  # before torch; does not import it

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="sim", help="sim, sim:rtx3060, cuda, ... (%(default)s)")
parser.add_argument("--budget", default="1MiB", help="most bytes there (%(default)s)")
parser.add_argument("--strategy", default="lru", help="genoa, lru, ... (%(default)s)")
options = parser.parse_args()

import torch  # noqa: E402 (the order is what this shows)

manager = torchTensorRef.tensorsManager
manager.device = options.device
manager.budget = options.budget  # optional: the most it may hold there
manager.strategy = options.strategy  # may be changed at any time, as the others may
torchTensorRef.injectTo.append("transformers")  # also where names were taken before us
torchTensorRef.injectTo.exclude("transformers.utils")

hi = torch.rand(2, 3)  # a TensorRef, in host memory
print("a tensor:       ", isinstance(hi, torch.Tensor), type(hi).__name__)
print("its bytes:      ", hi.proxyInfo)

same = hi.toGPU()  # now it is on the accelerator; hi is still the same object
print("after toGPU():  ", hi.proxyInfo, "- same object:", same is hi)
print("the plain one:  ", type(hi.target).__name__, "on", hi.proxyInfo.device)
print("the program sees", hi.device, "- what it asked for, wherever the bytes are")
print(hi)  # prints as a torch.Tensor prints

total = (hi @ hi.T).sum()  # operators run where the bytes are
print(f"a number:        {total:.4f}, computed on {total.proxyInfo.device}")

view = hi[0]  # one block under both: what is written through one is seen through the other
view.zero_()
print("a view shares:  ", view.proxyInfo.block == hi.proxyInfo.block, hi[0].tolist())

hi.toCPU()  # the way back
print("after toCPU():  ", hi.proxyInfo)

# The first operator without room is told in a warning. Here that is meant.
warnings.filterwarnings("ignore", "torchTensorRef: ")
large = torch.rand(700, 700)  # 1.87 MiB: with a budget of 1 MiB it cannot be there
product = large @ large
print("larger than all:", product.proxyInfo.device, f"{product.mean():.2f}")

plain = manager.release(hi)  # a plain tensor on the same memory
print("released:       ", type(plain).__name__, "and back:", type(manager.adopt(plain)).__name__)
with torchTensorRef.disabled():
    print("switched off:   ", type(torch.rand(2)).__name__)

print("\nThe story of hi:", *manager.story(hi), sep="\n")
print(f"\n{manager.report()}")
