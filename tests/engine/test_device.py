import os

import pytest
import torch

from rlcore.engine.device import explains_memory, pays_to_compile, prepare_device
from rlcore.errors import DeviceMemoryError


@pytest.mark.parametrize(("device", "allowed"), [("cpu", True), ("cuda:0", False)])
def test_cudnn_attention_is_off_in_a_process_with_a_gpu(device, allowed):
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        prepare_device(torch.device(device))
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(("device", "chosen"), [("cpu", False), ("cuda:0", True)])
def test_deterministic_kernels_are_chosen_in_a_process_with_a_gpu(device, chosen, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        prepare_device(torch.device(device), deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() is chosen
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is chosen
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_call_that_does_not_fit_says_which_and_what_to_lower():
    remedies = ["engine.micro_batch_tokens=8192", "engine.offload=true"]
    with (
        pytest.raises(DeviceMemoryError) as caught,
        explains_memory("update", 128, 78_336, torch.device("cpu"), remedies),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert str(caught.value) == (
        "update of 128 rows with 78336 tokens does not fit into the memory of cpu. "
        "Try one of these: engine.micro_batch_tokens=8192; engine.offload=true"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("device", "parameters", "pays"), [("cuda", 10**9, True), ("cuda", 10**6, False), ("cpu", 10**9, False)]
)
def test_compiling_pays_for_large_models_on_a_gpu_and_never_with_deterministic_algorithms(device, parameters, pays):
    assert pays_to_compile(torch.device(device), parameters) is pays
    torch.use_deterministic_algorithms(True)
    try:
        assert not pays_to_compile(torch.device(device), parameters)
    finally:
        torch.use_deterministic_algorithms(False)
