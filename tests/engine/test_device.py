import pytest
import torch

from rlcore.engine.device import prepare_device


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
