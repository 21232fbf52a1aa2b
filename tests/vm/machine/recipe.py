"""What is in the small virtual machine: its packages and its start-up scripts.

Everything here is part of the recipe: a change gives the image another
digest, so that the next start builds it anew (see `vm_image`).
"""

# Besides Debian's essential packages and apt. systemd is there for its files
# and tools (systemd-sysctl, systemd-tmpfiles, systemctl); PID 1 is busybox,
# which boots in a fraction of the time under software emulation.
PACKAGES = (
    "busybox-static",
    "gdb",
    "grub-pc-bin",
    "grub2-common",
    "iproute2",
    "kmod",
    "openssh-client",
    "openssh-server",
    "pciutils",
    "pdsh",
    "procps",
    "python3",
    "strace",
    "sudo",
    "systemd",
)

# The name of the kernel's package, by ID of /etc/os-release: both are built
# for virtual machines and have Yama.
KERNEL = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}

# Loaded by the initramfs, in this order, each after what it depends on. What
# is built into the kernel is skipped.
MODULES = ("virtio", "virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "ext4")

# The address that qemu's user network routes its forwarded ports to.
ADDRESS = "10.0.2.15/24"
GATEWAY = "10.0.2.2"
NAMESERVER = "10.0.2.3"

# An ordinary user for the tests, beside root.
USER = "ml"
USER_ID = 2000

# Run by mmdebstrap while the package lists are still there; $1 is the tree.
# The kernel is unpacked and not installed: its scripts would build an
# initramfs of their own, which takes longer than all the rest.
FETCH_KERNEL = """\
#!/bin/sh
set -eu
mkdir "$1/tmp/kernel"
cat > "$1/tmp/kernel/fetch" <<'END'
set -eu
cd /tmp/kernel
names=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \\
    --no-breaks --no-replaces --no-enhances "$1" | \\
    sed -nE 's/^(linux-(image|modules)-[0-9].*)$/\\1/p' | sort -u)
apt-get -o APT::Sandbox::User=root download $names
for deb in *.deb; do dpkg-deb -x "$deb" tree; done
cp -a tree/boot/. /boot/
mkdir -p /usr/lib/modules
for modules in tree/lib/modules tree/usr/lib/modules; do
    if [ -d $modules ]; then cp -a $modules/. /usr/lib/modules/; fi
done
END
chroot "$1" sh /tmp/kernel/fetch "$KERNEL"
rm -r "$1/tmp/kernel"
"""

INITRAMFS_INIT = """\
#!/bin/busybox sh
PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
while read -r module; do
    busybox insmod "/modules/$module" || echo "initramfs: cannot load $module"
done < /modules/order
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 100 ]; do
    busybox sleep 0.1
    tries=$((tries + 1))
done
busybox mount -t ext4 -o rw,errors=remount-ro /dev/vda /root || {
    echo "initramfs: cannot mount /dev/vda"
    busybox reboot -f
}
for dir in dev proc sys; do busybox mount -o move /$dir /root/$dir; done
init=/sbin/init
for word in $(busybox cat /root/proc/cmdline); do
    case $word in init=*) init=${word#init=} ;; esac
done
exec busybox switch_root /root "$init"
"""

INITTAB = """\
::sysinit:/usr/local/sbin/vm-boot
::respawn:/usr/sbin/sshd -D
::shutdown:/usr/local/sbin/vm-shutdown
"""

SHUTDOWN = """\
#!/bin/sh
sync
mount -o remount,ro / 2> /dev/null || true
"""

# The image's first and only boot before it goes to the cache: GRUB's own tool
# writes grub.cfg, which it can only do on the real disk.
PRIME = """\
#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
update-grub
sync
mount -o remount,ro /
exec busybox reboot -f
"""

# PCI devices that a test planted, beside the machine's own: the kernel has no
# driver for them, but what looks into /sys/bus/pci/devices finds them.
PCI = """\
#!/bin/sh
set -eu
planted=/var/lib/vm/pci
devices=/sys/bus/pci/devices
[ -d $planted ] || exit 0
if mountpoint -q $devices; then umount $devices; fi
names=$(ls $devices)
links=$(cd $devices && for name in $names; do readlink "$name"; done)
mount -t tmpfs -o mode=755 planted $devices
for link in $links; do ln -s "$link" "$devices/${link##*/}"; done
cp -R $planted/. $devices/
"""

# What systemd does at boot, as far as it matters to nodeready, with systemd's
# own tools and in its order: modules, sysctl, tmpfiles, network, services.
# Debian's pam_limits starts every session from the limits of PID 1; systemd
# raises its own hard limit of open files to fs.nr_open.
BOOT = f"""\
#!/bin/sh
PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
mount -t tmpfs -o mode=755,nosuid,nodev run /run
mkdir -p /run/lock /run/sshd
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t securityfs securityfs /sys/kernel/security
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
busybox hostname -F /etc/hostname
/lib/systemd/systemd-modules-load
/lib/systemd/systemd-sysctl
vm-pci
systemd-tmpfiles --create --remove --boot --exclude-prefix=/dev
ip link set lo up
ip address add {ADDRESS} dev eth0
ip link set eth0 up
ip route add default via {GATEWAY}
prlimit --pid 1 --nofile=1024:1048576
rm -f /run/nologin
"""
