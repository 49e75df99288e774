"""Facts about the machine in records, and the speed of its matrix products."""

import torch

import maclaurin
from maclaurin.machine import full_stamp, machine_facts, matmul_flops_per_second, stamp, versions_of


def test_facts_name_versions_and_processor():
    facts = machine_facts()
    assert facts["versions"]["maclaurin"] == maclaurin.__version__
    assert facts["versions"]["numpy"]
    assert facts["processor"]
    assert facts["cores"] >= 1


def test_a_stamp_has_the_same_machine_a_date_and_the_version_of_torch():
    facts, stamped = machine_facts(), stamp()
    assert {key: stamped[key] for key in ("python", "platform", "processor", "gpu")} == {
        key: facts[key] for key in ("python", "platform", "processor", "gpu")
    }
    assert stamped["torch"] == facts["versions"]["torch"]
    assert len(stamped["date"]) == 10
    assert full_stamp().keys() == {*stamped, "code", "versions"}


def test_a_package_that_is_not_installed_has_no_version():
    assert versions_of(["no-such-package"]) == {"no-such-package": None}


def test_a_matrix_product_takes_time():
    assert 1e6 < matmul_flops_per_second(torch.device("cpu"), torch.float32) < 1e15
