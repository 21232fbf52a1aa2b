# The facts of a system in files, without a process for each.
for nr_dir in /sys/bus/pci/devices/*; do
    nr_line=
    { read -r nr_line <"$nr_dir/vendor"; } 2>/dev/null
    if [ "$nr_line" = @VENDOR@ ]; then nr_value device "$nr_dir/device"; fi
done
while IFS=: read -r nr_key nr_line; do
    case $nr_key in "model name"*) printf 'cpu_model=%s\n' "$nr_line"; break ;; esac
done </proc/cpuinfo
if [ ! -r /proc/sys/kernel/arch ]; then printf 'architecture=%s\n' "$(uname -m)"; fi
if [ /etc/localtime -ef /usr/share/zoneinfo/Etc/UTC ]; then
    printf 'localtime=Etc/UTC\n'
elif [ -L /etc/localtime ]; then
    printf 'localtime=%s\n' "$(readlink /etc/localtime)"
elif [ -e /etc/localtime ]; then
    printf 'localtime=\n'
else
    printf 'localtime=Etc/UTC\n'
fi
if [ -e /etc/os-release ]; then nr_file=/etc/os-release; else nr_file=/usr/lib/os-release; fi
@TABLE@
nr_lines all "$nr_file" /proc/sys/kernel/osrelease /proc/sys/kernel/arch /proc/sys/kernel/hostname \
    /proc/sys/kernel/random/boot_id /proc/sys/kernel/pid_max /proc/sys/kernel/threads-max \
    /proc/sys/kernel/numa_balancing /proc/sys/fs/file-nr /proc/cmdline /proc/uptime \
    /proc/loadavg /proc/meminfo /sys/kernel/mm/transparent_hugepage/enabled \
    /sys/devices/system/cpu/online /sys/devices/system/node/online /sys/fs/selinux/enforce \
    /sys/module/apparmor/parameters/enabled /etc/timezone /etc/fstab
