"""The kernel's arguments for the IOMMU, in force and at the next boot."""
