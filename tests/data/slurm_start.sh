
tar -x -C /
cd /
cgroups=/sys/fs/cgroup/freezer
if [ -n "$group" ]; then
    if [ ! -e $cgroups/cgroup.procs ]; then
        mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
        mkdir $cgroups
        mount -t cgroup -o freezer freezer $cgroups
        mkdir -p "$cgroups$group"
        echo $$ >"$cgroups$group/cgroup.procs"
        umount $cgroups
        unshare -C mount -t cgroup -o freezer freezer $cgroups
    fi
    echo $$ >$cgroups/cgroup.procs
fi
chown munge:munge /etc/munge /etc/munge/munge.key
if ! munge -n >/dev/null 2>&1; then
    install -d -o munge -g munge -m 755 /run/munge
    install -d -o munge -g munge -m 700 /var/lib/munge /var/log/munge
    install -d -m 755 /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm
    setpriv --reuid=munge --regid=munge --clear-groups munged
fi
if pid=$(cat /run/$daemon.pid 2>/dev/null) && kill "$pid" 2>/dev/null; then
    i=0
    while kill -0 "$pid" 2>/dev/null; do
        if [ $((i += 1)) = 1500 ]; then echo "$daemon does not end" >&2; exit 1; fi
        sleep 0.02
    done
fi
ulimit -Sc 0 || :
ulimit -n 131072 2>/dev/null || :
ulimit -l unlimited 2>/dev/null || :
ulimit -s unlimited 2>/dev/null || :
setpriv --bounding-set=-sys_module,-sys_rawio,-sys_time unshare -C $daemon
i=0
while ! grep -q ":$port 00000000:0000 0A" /proc/net/tcp; do
    if [ $((i += 1)) = 1500 ]; then
        echo "$daemon does not listen: $(tail -n 1 /var/log/slurm/$daemon.log)" >&2
        exit 1
    fi
    sleep 0.02
done
