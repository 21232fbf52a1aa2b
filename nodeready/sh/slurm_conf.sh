# The lines of slurm.conf that say @KEYS@. Included files mostly stand in slurm.conf's directory, so that
# all files of it are read.
# shellcheck disable=SC2043 # @DIRECTORIES@ are several
for nr_dir in @DIRECTORIES@; do
    if [ -f "$nr_dir/slurm.conf" ]; then
        printf 'slurm=%s/slurm.conf\n' "$nr_dir"
        set -- "$nr_dir"/*.conf
        if [ -d "$nr_dir/slurm.conf.d" ]; then set -- "$@" "$nr_dir"/slurm.conf.d/*; fi
        grep -asHniE '^[[:space:]]*(@KEYS@)([[:space:]]|=)' "$@" /dev/null
        break
    fi
done
