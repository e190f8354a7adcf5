"""What detection and segmentation share: features of a pyramid backbone, the feature pyramid, pretrained weights."""
