# The files of the node's own check, and what could run it.
nr_there there @FILES@
if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
if [ -d /etc/cron.d ]; then printf 'cron=1\n'; fi
if command -v slurmd >/dev/null 2>&1 || [ -x /opt/slurm/sbin/slurmd ]; then
    printf 'slurmd=1\n'
fi
