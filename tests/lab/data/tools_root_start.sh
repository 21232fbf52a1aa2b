mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$2"
cd "$2"
mkdir up work root
mount -t overlay -o "lowerdir=$1,upperdir=up,workdir=work" none root
cd root
mount -t proc none proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind proc/sys/net proc/sys/net
mount -o remount,bind,rw proc/sys/net
mount -t sysfs -o ro none sys
mount -t tmpfs -o mode=755 none dev
mount -t tmpfs -o mode=755 none run
for name in null zero full random urandom tty; do
    touch "dev/$name"
    mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
mkdir run/dbus run/lock
ip link set lo up
exec chroot . sh -c 'echo ready; exec sleep infinity >/dev/null'
