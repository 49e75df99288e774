"""Facts about the machine in records, and the speed of its matrix products."""

import datetime

import torch

import maclaurin
from maclaurin.machine import BENCHMARKED_PACKAGES, matmul_flops_per_second, provenance, versions_of


def test_provenance_names_versions_processor_and_date():
    facts = provenance()
    assert facts["versions"]["maclaurin"] == maclaurin.__version__
    assert facts["versions"]["numpy"]
    assert facts["processor"]
    assert facts["cores"] >= 1
    assert datetime.datetime.fromisoformat(facts["date"]).tzinfo is not None
    assert len(facts["code"]) == 64


def test_provenance_of_a_benchmark_has_the_versions_of_its_peers_and_of_cuda():
    versions = provenance(BENCHMARKED_PACKAGES)["versions"]
    assert versions.keys() >= {"torch", "triton", "cuda", "cudnn"}
    assert versions["cuda"] == torch.version.cuda


def test_a_package_that_is_not_installed_has_no_version():
    assert versions_of(["no-such-package"]) == {"no-such-package": None}


def test_a_matrix_product_takes_time():
    assert 1e6 < matmul_flops_per_second(torch.device("cpu"), torch.float32) < 1e15
