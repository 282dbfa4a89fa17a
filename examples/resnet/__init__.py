"""ResNet-18 of torchvision on images of digits."""
