"""Other people's libraries that live on torch, unmodified, with less memory than their data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..support.injection import assert_same_injected
from ..support.sweeps import give_by_turns, usual

tk = pytest.importorskip("tensorkrowch")
semiring = pytest.importorskip("torch_semiring_einsum")

#: What tensorkrowch 1.1 does and torch 2.13 advises against, with us or without.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")

STRATEGIES = ("genoa", "lru", "flow")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test one of the strategies; all where all is run."""
    give_by_turns(metafunc, "check", STRATEGIES)


@pytest.fixture
def check(request, manage) -> Callable[..., Any]:
    """Give `check(program, nbytes)`: the program's results are those of plain torch."""

    def run(program: Callable[[], Any], nbytes: int) -> Any:
        manager = manage(request.param, nbytes)
        assert_same_injected(program, manager)
        stats = manager.stats()
        assert stats["fetched_nbytes"] + stats["written_back_nbytes"] > nbytes, "it all fitted"
        return manager

    return run


# -- TensorKrowch ----------------------------------------------------------------------------------


def chain(network: Any, kind: Any, count: int = 8) -> list[Any]:
    """Nodes in a row, each tied to the next one."""
    nodes = [
        kind(
            shape=(6, 5, 6),
            axes_names=("left", "input", "right"),
            name=f"node_{i}",
            network=network,
            init_method="randn",
        )
        for i in range(count)
    ]
    for one, other in itertools.pairwise(nodes):
        one["right"] ^ other["left"]
    nodes[-1]["right"] ^ nodes[0]["left"]
    return nodes


def contracted_chain() -> Any:
    """Nodes contracted one by one, then split again; the nodes keep their own tensors."""
    network = tk.TensorNetwork()
    nodes = chain(network, tk.Node, 5)  # each more makes the product five times as large
    result = nodes[0]
    for node in nodes[1:]:
        result = result @ node
    halves = tk.split(
        node=nodes[2] @ nodes[3],
        node1_axes=["left", "input_0"],
        node2_axes=["input_1", "right"],
        rank=4,
    )
    return [result.tensor, *(half.tensor for half in halves), *(node.tensor for node in nodes)]


@pytest.mark.parametrize(("auto_stack", "auto_unbind"), [(a, b) for a in (0, 1) for b in (0, 1)])
def test_stacked_nodes_share_one_memory(check, auto_stack, auto_unbind):
    def program() -> Any:
        network = tk.TensorNetwork()
        network.auto_stack, network.auto_unbind = bool(auto_stack), bool(auto_unbind)
        nodes = chain(network, tk.ParamNode)
        network.set_data_nodes([node["input"] for node in nodes], num_batch_edges=1)
        seen = []
        for _ in range(3):
            network.add_data(torch.randn(4, 8, 5))
            stacked_nodes, stacked_inputs = (
                tk.stack(nodes),
                tk.stack(list(network.data_nodes.values())),
            )
            stacked_nodes ^ stacked_inputs
            matrices = tk.unbind(stacked_nodes @ stacked_inputs)
            result = matrices[0]
            for matrix in matrices[1:]:
                result = result @ matrix
            seen.append(result.tensor.detach().clone())
            result.tensor.sum().backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-4)
                    parameter.grad.zero_()
        return [seen, [node.tensor.detach() for node in nodes], network.state_dict()]

    check(program, 4 << 10)


def test_a_chain_is_contracted_and_split(check):
    check(contracted_chain, 8 << 10)


def test_nodes_borrow_the_memory_of_another_node(check):
    def program() -> Any:
        network = tk.TensorNetwork()
        uniform = tk.ParamNode(
            shape=(12, 8, 12),
            axes_names=("left", "input", "right"),
            name="virtual_uniform",
            network=network,
            virtual=True,
            init_method="randn",
            std=0.3,
        )
        nodes = []
        for i in range(6):
            node = tk.ParamNode(
                shape=(12, 8, 12),
                axes_names=("left", "input", "right"),
                name=f"node_{i}",
                network=network,
            )
            node.set_tensor_from(uniform)
            nodes.append(node)
        for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            one["right"] ^ other["left"]
        results = []
        for value in (1.0, 0.5):
            with torch.no_grad():
                uniform.tensor.mul_(value)
            product = nodes[0]
            for i, node in enumerate(nodes[1:]):
                product = product @ node if i < 2 else product
            results.append(product.tensor.detach().clone())
            network.reset()
        return [results, *(node.tensor.detach() for node in nodes)]

    check(program, 6 << 10)


def trained_mps(*, auto_stack: bool, auto_unbind: bool, boundary: str, inline: bool) -> Any:
    """The tutorial's classifier: trained for some steps, made canonical, and used."""
    mps = tk.models.MPSLayer(
        n_features=7,
        in_dim=3,
        out_dim=4,
        bond_dim=6,
        boundary=boundary,
        init_method="randn_eye",
        std=1e-2,
    )
    mps.auto_stack, mps.auto_unbind = auto_stack, auto_unbind
    x, y = torch.rand(16, 6), torch.randint(4, (16,))
    mps.trace(tk.embeddings.poly(torch.zeros(1, 6), degree=2), inline_input=inline)
    optimizer = torch.optim.Adam(mps.parameters(), lr=1e-2, weight_decay=1e-6)
    losses = []
    for _ in range(3):
        scores = mps(tk.embeddings.poly(x, degree=2), inline_input=inline)
        loss = torch.nn.functional.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mps.reset()
    with torch.no_grad():
        before = mps(tk.embeddings.poly(x, degree=2))
        mps.reset()
        mps.canonicalize(rank=4)
        after = mps(tk.embeddings.poly(x, degree=2))
    return [losses, before, after, [p.detach() for p in mps.parameters()], mps.state_dict()]


@pytest.mark.parametrize(
    ("auto_stack", "auto_unbind", "boundary", "inline"),
    usual(
        [(True, True, "obc", True), (False, False, "pbc", False)],
        [(True, False, "obc", False), (True, True, "pbc", False)],
    ),
)
def test_a_matrix_product_state_is_trained(check, auto_stack, auto_unbind, boundary, inline):
    def program() -> Any:
        return trained_mps(
            auto_stack=auto_stack, auto_unbind=auto_unbind, boundary=boundary, inline=inline
        )

    check(program, 4 << 10)


def test_a_uniform_state_and_a_state_of_several_dimensions(check):
    def program() -> Any:
        uniform = tk.models.UMPSLayer(n_features=7, in_dim=3, out_dim=4, bond_dim=6)
        x = tk.embeddings.add_ones(torch.rand(8, 6))
        x = torch.cat([x, torch.rand(8, 6, 1)], dim=2)
        scores = uniform(x)
        scores.sum().backward()
        peps = tk.models.PEPS(n_rows=2, n_cols=2, in_dim=2, bond_dim=[3, 3])
        surface = peps(tk.embeddings.add_ones(torch.rand(5, 4)))
        surface.sum().backward()
        gradients = [p.grad for net in (uniform, peps) for p in net.parameters()]
        return [scores.detach(), surface.detach(), gradients]

    check(program, 2 << 10)


# -- torch_semiring_einsum -------------------------------------------------------------------------

BLOCKS = (3, semiring.AUTOMATIC_BLOCK_SIZE)
EQUATIONS = ("bik,bkj->bij", "ij,jk,kl->il", "bxi,bxj->bij", "ijk,k->")


def operands(equation: str, *, requires_grad: bool = True) -> list[torch.Tensor]:
    """A tensor for each operand of an equation."""
    sizes = dict(zip("bijklx", (4, 5, 7, 8, 4, 6), strict=True))
    return [
        torch.randn([sizes[name] for name in names], requires_grad=requires_grad)
        for names in equation.partition("->")[0].split(",")
    ]


@pytest.mark.parametrize("block_size", BLOCKS, ids=["blocks of 3", "automatic"])
@pytest.mark.parametrize("name", ["einsum", "log_einsum"])
def test_sums_of_products_forward_and_backward(check, name, block_size):
    def program() -> Any:
        found = []
        for text in EQUATIONS:
            args = operands(text)
            equation = semiring.compile_equation(text)
            result = getattr(semiring, name)(equation, *args, block_size=block_size)
            result.backward(torch.randn(result.shape))
            found += [result.detach(), *(arg.grad for arg in args)]
        return found

    check(program, 1 << 10)


@pytest.mark.parametrize("block_size", BLOCKS, ids=["blocks of 3", "automatic"])
def test_best_paths(check, block_size):
    def program() -> Any:
        found = []
        for text in EQUATIONS:
            equation = semiring.compile_equation(text)
            args = operands(text, requires_grad=False)
            found += semiring.log_viterbi_einsum_forward(equation, *args, block_size=block_size)
        return found

    check(program, 1 << 10)


def test_infinities_have_the_gradients_of_plain_torch(check):
    def program() -> Any:
        equation = semiring.compile_equation("ij,jk->ik")
        a, b = torch.randn(8, 12), torch.randn(12, 8)
        a[3], b[:, 2] = -torch.inf, -torch.inf
        a.requires_grad_()
        b.requires_grad_()
        result = semiring.log_einsum(equation, a, b, block_size=5, grad_of_neg_inf=0.0)
        result[result > -torch.inf].sum().backward()
        return [result.detach(), a.grad, b.grad]

    check(program, 512)


def test_a_semiring_of_ones_own(check):
    def program() -> Any:
        equation = semiring.compile_equation("bik,bkj->bij")
        args = operands("bik,bkj->bij", requires_grad=False)

        def tropical(compute_sum: Any) -> Any:
            def add(a: torch.Tensor, b: torch.Tensor) -> None:
                torch.minimum(a, b, out=a)

            def sum_block(a: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
                return a.amin(dim=dims) if dims else a

            def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
                a.add_(b)

            return compute_sum(add, sum_block, multiply)

        return semiring.semiring_einsum_forward(equation, args, 4, tropical)

    check(program, 1 << 10)
