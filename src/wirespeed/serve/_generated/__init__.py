"""What protos/generate.py made, in a descriptor pool of its own."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
