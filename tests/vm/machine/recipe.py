"""What is in the small virtual machine: its packages; `files/` has its start-up scripts.

Everything here and there is part of the recipe: a change gives the image another
digest, so that the next start builds it anew (see `vm_image`).
"""

# Besides Debian's essential packages and apt. systemd is there for its files and tools
# (systemd-sysctl, systemd-tmpfiles, systemctl); PID 1 is busybox, which boots in a fraction of the
# time under software emulation.
PACKAGES = (
    *("busybox-static", "gdb", "grub-pc-bin", "grub2-common", "iproute2", "kmod"),
    *("openssh-client", "openssh-server", "pciutils", "pdsh", "procps", "python3", "strace"),
    *("sudo", "systemd"),
)

# The kernel's package by ID of /etc/os-release: both are for virtual machines and have Yama.
KERNEL = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}

# Loaded by the initramfs in this order, each after what it depends on, if it is no built-in.
MODULES = ("virtio", "virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "ext4")

# The address that qemu's user network routes its forwarded ports to.
ADDRESS = "10.0.2.15/24"
GATEWAY = "10.0.2.2"
NAMESERVER = "10.0.2.3"

# An ordinary user for the tests, beside root.
USER = "ml"
USER_ID = 2000
