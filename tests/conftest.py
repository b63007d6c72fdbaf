"""What all tests share: property tests that draw the same examples every time, on a machine of any speed."""

from hypothesis import settings

settings.register_profile("wirespeed", deadline=None, derandomize=True)
settings.load_profile("wirespeed")
