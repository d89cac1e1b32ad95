"""A UNet of diffusers in accelerate's loop at stage 2, as in docs/guides/accelerate.md."""

import accelerate
import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn.functional import mse_loss

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

accelerate.PartialState(cpu=True)
torch.manual_seed(0)
config = tiny.config(2) | {"gradient_clipping": 0.0}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
sizes = {"sample_size": 16, "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
sizes |= {"block_out_channels": (32, 32), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
model = UNet2DModel(**sizes, down_block_types=("DownBlock2D", "AttnDownBlock2D"))
images = torch.rand(16 * tiny.STEPS, 1, 1, 1).expand(-1, 3, 16, 16).contiguous()
loader = torch.utils.data.DataLoader(images, batch_size=8)
model, optimizer, loader = accelerator.prepare(
    model, DummyOptim(model.parameters(), lr=tiny.RATE), loader
)
noises, losses = DDPMScheduler(), []
for batch in loader:
    noise, times = torch.randn_like(batch), torch.randint(1000, (len(batch),))
    guess = model(noises.add_noise(batch, noise, times), times).sample
    loss = mse_loss(guess, noise)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
tiny.check(model, stage=2)
if dist.get_rank() == 0:
    tiny.result(losses, dist.get_world_size(), stage=2)
dist.destroy_process_group()
