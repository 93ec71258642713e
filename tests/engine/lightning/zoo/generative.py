"""Generative models: adversarial, variational, plain and tied autoencoders, mixture densities."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.lightning.modules import FEATURES
from tests.engine.lightning.zoo.case import Case


class GAN(pl.LightningModule):
    """The example of the documentation: two optimizers, toggled, with latent seeds of a generator of its own."""

    def __init__(self, latent: int = 4, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 8), nn.LeakyReLU(0.2), nn.Linear(8, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, seeds: Tensor) -> Tensor:
        return self.generator(seeds)

    def adversarial_loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(scores, target)

    def seeds(self, like: Tensor) -> Tensor:
        numbers = torch.Generator().manual_seed(self.global_step)
        return torch.randn(len(like), self.hparams.latent, generator=numbers).type_as(like)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        optimizer_g, optimizer_d = self.optimizers()
        seeds = self.seeds(real)
        ones, zeros = torch.ones(len(real), 1).type_as(real), torch.zeros(len(real), 1).type_as(real)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(seeds)), ones)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), ones)
        fake_loss = self.adversarial_loss(self.discriminator(self(seeds).detach()), zeros)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [optimizer_g, optimizer_d], []


class PenalisedCritic(GAN):
    """A Wasserstein critic with gradient penalty, trained five times as often as the generator."""

    num_critic = 5

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        optimizer_g, optimizer_d = self.optimizers()
        fake = self(self.seeds(real)).detach()
        share = torch.rand(len(real), 1, generator=torch.Generator().manual_seed(batch_idx)).type_as(real)
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        d_loss = self.discriminator(fake).mean() - self.discriminator(real).mean() + 10 * penalty
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.log("d_loss", d_loss)
        if (batch_idx + 1) % self.num_critic == 0:
            with optimizer_g.toggle_model():
                optimizer_g.zero_grad()
                self.manual_backward(-self.discriminator(self(self.seeds(real))).mean())
                optimizer_g.step()


class Autoencoder(pl.LightningModule):
    """The first example of Lightning's documentation."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = functional.mse_loss(self(x), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.log("val_loss", functional.mse_loss(self(x), x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def autoencoder() -> Autoencoder:
    return Autoencoder(
        nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, FEATURES)),
    )


class TiedAutoencoder(Autoencoder):
    """A decoder that uses the encoder's weight transposed."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 3), nn.Identity())
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class VAE(pl.LightningModule):
    """A variational autoencoder that draws its noise as everybody does."""

    def __init__(self, latent: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU())
        self.mean, self.log_var = nn.Linear(8, latent), nn.Linear(8, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 8), nn.ReLU(), nn.Linear(8, FEATURES))

    def noise(self, like: Tensor) -> Tensor:
        return torch.randn_like(like)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.encoder(batch[0])
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        latent = mean + self.noise(mean) * torch.exp(0.5 * log_var)
        reconstruction = functional.mse_loss(self.decoder(latent), batch[0])
        divergence = -0.5 * torch.mean(1 + log_var - mean.square() - log_var.exp())
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence}, on_step=False, on_epoch=True)
        return reconstruction + 0.1 * divergence

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SeededVAE(VAE):
    """The same, with noise that is a function of the step."""

    def noise(self, like: Tensor) -> Tensor:
        numbers = torch.Generator().manual_seed(1000 + self.global_step)
        return torch.randn(like.shape, generator=numbers).type_as(like)


class MixtureDensity(pl.LightningModule):
    """A mixture of normal distributions whose parameters a network gives, by torch.distributions."""

    def __init__(self, components: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES - 1, 8), nn.Tanh(), nn.Linear(8, 3 * components))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, means, log_scales = self.net(batch[0][:, 1:]).chunk(3, dim=1)
        mixture = torch.distributions.Categorical(logits=logits)
        parts = torch.distributions.Normal(means, log_scales.exp())
        loss = -torch.distributions.MixtureSameFamily(mixture, parts).log_prob(batch[0][:, 0]).mean()
        self.log("nll", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


CASES = [
    Case("gan", "GAN: manual optimisation, two optimizers, toggled", GAN, quick=True),
    Case("wgan-gp", "critic with gradient penalty, generator every fifth batch, toggle_model", PenalisedCritic),
    Case("autoencoder", "the autoencoder of Lightning's first page", autoencoder),
    Case("tied-autoencoder", "decoder with the encoder's weight transposed", TiedAutoencoder),
    Case("vae", "VAE with torch.randn_like in the step", VAE,
         difference="random numbers of a step are keyed by seed and step here, so that a restart draws them again"),
    Case("vae-seeded", "VAE with noise from a generator seeded by the step", SeededVAE),
    Case("mixture-density", "mixture density network by torch.distributions", MixtureDensity),
]  # fmt: skip
