# The lines of slurm.conf about its prolog and health check. Its directories: first that of a configless
# slurmd, whose file is slurmctld's. Included files mostly stand in the same one, so that all files of it
# are read.
for nr_dir in /run/slurm/conf /etc/slurm /etc/slurm-llnl /usr/local/etc /opt/slurm/etc; do
    if [ -f "$nr_dir/slurm.conf" ]; then
        printf 'slurm=%s/slurm.conf\n' "$nr_dir"
        set -- "$nr_dir"/*.conf
        if [ -d "$nr_dir/slurm.conf.d" ]; then set -- "$@" "$nr_dir"/slurm.conf.d/*; fi
        grep -asHniE '^[[:space:]]*(prolog|healthcheckprogram|healthcheckinterval|prologepilogtimeout|include)([[:space:]]|=)' "$@" /dev/null
        break
    fi
done
