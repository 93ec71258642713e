from lightning.pytorch.cli import LightningCLI
from project import Regression, Sines

if __name__ == "__main__":
    LightningCLI(Regression, Sines)
