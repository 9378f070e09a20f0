"""Which libraries' tests are run, and which of them: a table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """One library's tests, as its source distribution has them."""

    #: Its name and version, as they are installed: `name==version`.
    requirement: str
    #: What pytest is given, in the unpacked source distribution.
    tests: tuple[str, ...]
    #: A selection by name, as `-k` takes it.
    matching: str = ""
    #: Installed beside it, without what they need in turn: no other torch may come along.
    needs: tuple[str, ...] = ()
    #: Variables by which it is told that it is about torch.
    environ: dict[str, str] = field(default_factory=dict)
    #: Folders whose tests import each other, and whose `__init__.py` was not packed.
    packages: tuple[str, ...] = ()
    #: Where in the source distribution it is run, if not at its top.
    folder: str = ""
    #: What is left out, and why.
    left_out: str = ""
    #: Why tests differ, as known issues have it, if some do.
    because: str = ""
    #: A plugin of `plugins/` that pytest is given.
    plugin: str = ""
    #: Which part of a library's tests it is, where another row has others.
    part: str = ""
    #: Takes so long that it is run by its name only, or with `--long`.
    is_long: bool = False

    @property
    def name(self) -> str:
        library = self.requirement.partition("==")[0]
        return f"{library}:{self.part}" if self.part else library


#: Too little for anything: everything comes and goes. And so much that nothing has to.
BUDGETS = {"tight": "64KiB", "roomy": "4GiB"}

_TYPED_ARRAYS = ("jaxtyping==0.3.11", "wadler-lindig==0.1.8")

SUITES = {
    suite.name: suite
    for suite in (
        Suite("einops==0.8.2", ("einops/tests",), environ={"EINOPS_TEST_BACKENDS": "numpy,torch"}),
        Suite("opt_einsum==3.4.0", ("opt_einsum/tests",)),
        Suite(
            "autoray==0.11.0",
            ("tests",),
            matching="torch",
            left_out="other libraries of arrays",
        ),
        Suite(
            "tensorly==0.10.0",
            ("tensorly/tenalg", "tensorly/metrics", "tensorly/regression"),
            environ={"TENSORLY_BACKEND": "pytorch"},
            left_out="what is a row by itself",
        ),
        Suite(
            "linear_operator==0.6.1",
            ("test/utils", "test/functions"),
            needs=_TYPED_ARRAYS,
            left_out="what is a row by itself",
        ),
        Suite(
            "gpytorch==1.15.2",
            ("test/constraints", "test/priors", "test/means", "test/distributions"),
            needs=("linear_operator==0.6.1", *_TYPED_ARRAYS),
            left_out="what is a row by itself",
        ),
        Suite(
            "torch-optimizer==0.3.0",
            ("tests/test_param_validation.py",),
            needs=("pytorch_ranger==0.1.1",),
            left_out="optimizing, which takes long",
        ),
        Suite(
            "accelerate==1.15.0",
            (
                "tests/test_hooks.py",
                "tests/test_modeling_utils.py",
                "tests/test_big_modeling.py",
                "tests/test_data_loader.py",
                "tests/test_optimizer.py",
                "tests/test_scheduler.py",
                "tests/test_offload.py",
                "tests/test_memory_utils.py",
                "tests/test_kwargs_handlers.py",
                "tests/test_state_checkpointing.py",
                "tests/test_activation_checkpointing_offload.py",
                "tests/test_accelerator.py",
                "tests/test_utils.py",
            ),
            needs=("parameterized==0.9.0",),
            left_out="launchers, and what needs a model hub or several processes",
        ),
        Suite(
            "peft==0.21.2",
            (
                "tests/test_bufferdict.py",
                "tests/test_mapping.py",
                "tests/test_vblora.py",
                "tests/test_vera.py",
                "tests/test_pvera.py",
                "tests/test_randlora.py",
                "tests/test_mixed.py",
                "tests/test_loraplus.py",
                "tests/test_lorafa.py",
                "tests/test_shira.py",
                "tests/test_frod.py",
                "tests/test_deft.py",
                "tests/test_osf.py",
                "tests/test_unilora.py",
            ),
            needs=("parameterized==0.9.0",),
            packages=("tests",),
            left_out="models of a hub",
        ),
        Suite(
            "skorch==1.4.0",
            (
                "skorch/tests/test_dataset.py",
                "skorch/tests/test_helper.py",
                "skorch/tests/test_utils.py",
                "skorch/tests/test_setter.py",
                "skorch/tests/test_toy.py",
                "skorch/tests/callbacks/test_regularization.py",
                "skorch/tests/callbacks/test_lr_scheduler.py",
            ),
            needs=("tabulate==0.9.0", "flaky==3.8.1"),
            left_out="whole trainings, which take long",
        ),
        Suite(
            "safetensors==0.8.0",
            tuple(
                f"tests/test_{name}.py"
                for name in (
                    "handle",
                    "multithreaded",
                    "pread_backend",
                    "pt_comparison",
                    "pt_model",
                    "simple",
                    "threadable",
                )
            ),
            folder="bindings/python",
            left_out="other libraries of arrays",
        ),
        Suite("array_api_compat==1.16.0", ("tests",), matching="torch"),
        Suite(
            "timm==1.0.31",
            (
                "tests/test_layers.py",
                "tests/test_layers_drop.py",
                "tests/test_layers_pool.py",
                "tests/test_layers_pos_embed.py",
                "tests/test_input_conv.py",
                "tests/test_model_input.py",
                "tests/test_prune.py",
                "tests/test_scheduler.py",
                "tests/test_scheduled_sampler.py",
                "tests/test_utils.py",
                "tests/test_checkpoint_loading.py",
                "tests/test_checkpoint_saver.py",
                "tests/test_factory.py",
                "tests/test_task.py",
            ),
            needs=("torchvision==0.28.0",),
            plugin="torchvision_without_cuda",
            left_out="each model, each optimizer; data",
            is_long=True,
        ),
        Suite(
            "pytorch_optimizer==4.1.0",
            ("tests",),
            because="A compiled step that leaves new tensors in its optimizer's state is "
            "[intercepted](known-issues.md#compilation-and-tracing), and the test wants the "
            "compiler to have seen it. The numbers are the same.",
            is_long=True,
        ),
        Suite(
            "tensorly==0.10.0",
            ("tensorly/decomposition", "tensorly/tests", "tensorly/contrib", "tensorly/solvers"),
            environ={"TENSORLY_BACKEND": "pytorch"},
            part="decompositions",
            is_long=True,
        ),
        Suite(
            "linear_operator==0.6.1",
            ("test/operators",),
            needs=_TYPED_ARRAYS,
            part="operators",
            is_long=True,
        ),
        Suite(
            "gpytorch==1.15.2",
            (
                "test/kernels",
                "test/likelihoods",
                "test/mlls",
                "test/variational",
                "test/models",
                "test/utils",
                "test/optim",
            ),
            needs=("linear_operator==0.6.1", *_TYPED_ARRAYS),
            part="kernels",
            left_out="examples",
            is_long=True,
        ),
        Suite(
            "peft==0.21.2",
            ("tests/test_custom_models.py",),
            needs=(
                "parameterized==0.9.0",
                "datasets==5.2.0",
                "pyarrow==26.0.1",
                "dill==0.4.1",
                "pandas==3.1.1",
                "multiprocess==0.70.19",
                "xxhash==4.1.0",
                "httpx==0.28.1",
                "httpcore==1.0.9",
                "sniffio==1.3.1",
            ),
            packages=("tests",),
            part="custom-models",
            is_long=True,
        ),
    )
}
