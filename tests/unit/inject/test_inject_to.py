"""injectTo: a list of prefixes, and what the longest of them says."""

import os
import subprocess
import sys

import pytest

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.inject.inject_to import BY_DEFAULT, InjectTo


@pytest.fixture
def inject_to():
    return InjectTo()


def test_what_nobody_speaks_of_takes_part(inject_to):
    assert inject_to.decisions["some.library"] is True
    assert inject_to.rule("some.library") is None
    assert inject_to.decisions["__main__"] is True


def test_torch_and_we_are_left_out_with_reasons(inject_to):
    assert inject_to.decisions["torch.nn.functional"] is False
    assert inject_to.decisions["torch"] is False
    assert inject_to.decisions["torchTensorRef.interception.entry"] is False
    assert inject_to.decisions["torchvision.models"] is True
    assert all(reason for _, reason in BY_DEFAULT.values())


def test_the_longest_prefix_decides(inject_to):
    inject_to.exclude("lib")
    inject_to.append("lib.models")
    inject_to.exclude("lib.models.tiny")
    said = {name: inject_to.decisions[name] for name in ("lib", "lib.models.big", "library")}
    assert said == {"lib": False, "lib.models.big": True, "library": True}
    assert inject_to.decisions["lib.models.tiny.layers"] is False


def test_the_last_word_on_one_prefix_counts(inject_to):
    inject_to.append("lib")
    inject_to.exclude("lib")
    assert (list(inject_to), inject_to.excluded, inject_to.rule("lib")) == ([], ("lib",), False)
    inject_to.append("lib")
    assert (list(inject_to), inject_to.excluded, inject_to.rule("lib")) == (["lib"], (), True)


def test_it_is_a_list(inject_to):
    inject_to.extend(["a", "b"])
    inject_to.insert(0, "c")
    inject_to.append("a")
    assert list(inject_to) == ["c", "a", "b"]
    assert (len(inject_to), inject_to[0], "b" in inject_to) == (3, "c", True)
    assert inject_to == ["c", "a", "b"]
    inject_to.remove("a")
    assert repr(inject_to) == "<injectTo ['c', 'b']>"
    inject_to.exclude("d.e")
    assert repr(inject_to) == "<injectTo ['c', 'b'] without ['d.e']>"
    inject_to.clear()
    assert (list(inject_to), inject_to.excluded) == ([], ())
    assert inject_to.decisions["d.e"] is True


def test_a_module_is_as_good_as_its_name(inject_to):
    inject_to.append(os.path)
    assert list(inject_to) == [os.path.__name__]


@pytest.mark.parametrize("bad", ["", "a b", "a..b", "lib.*", 3, None])
def test_what_is_no_name_is_refused(inject_to, bad):
    with pytest.raises(ConfigError, match="not the name of a module"):
        inject_to.append(bad)
    assert list(inject_to) == []


def test_nothing_is_changed_by_a_bad_list(inject_to):
    with pytest.raises(ConfigError, match="not the name of a module"):
        inject_to.extend(["good", "b@d"])
    with pytest.raises(ConfigError, match="takes a list"):
        inject_to.extend("transformers")
    assert list(inject_to) == []


@pytest.mark.parametrize("bad", [None, 3])
def test_what_is_no_list_is_refused(inject_to, bad):
    with pytest.raises(ConfigError, match=f"extend takes a list of names, not {bad}"):
        inject_to.extend(bad)


def test_removing_what_is_not_there_names_the_nearest(inject_to):
    inject_to.append("transformers")
    with pytest.raises(ConfigError, match="transformers") as caught:
        inject_to.remove("transfromers")
    assert caught.value.nearest == "transformers"


def test_the_environment_says_it_too():
    program = "import torchTensorRef as t; print(list(t.injectTo), t.injectTo.excluded)"
    environ = {**os.environ, "TTR_INJECT_TO": "a,b.c", "TTR_EXCLUDE": "a.d"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['a', 'b.c'] ('a.d',)\n"


def test_a_place_that_is_none_changes_nothing(inject_to):
    inject_to.exclude("lib")
    with pytest.raises(TypeError):
        inject_to.insert("first", "lib")
    assert (list(inject_to), inject_to.excluded) == ([], ("lib",))


def test_we_ourselves_are_never_included(inject_to):
    for name in ("torchTensorRef", "torchTensorRef.memory"):
        for include in (inject_to.append, lambda name: inject_to.extend(["lib", name])):
            with pytest.raises(ConfigError, match="itself"):
                include(name)
    assert list(inject_to) == []
