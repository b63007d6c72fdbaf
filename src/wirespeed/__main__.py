"""``python -m wirespeed``."""

from wirespeed.cli.main import run

if __name__ == "__main__":
    run()
