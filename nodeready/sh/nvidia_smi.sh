# Without the driver, nvidia-smi would make the kernel load it: a probe changes nothing, so it does not run
# nvidia-smi then. An nvidia-smi that hangs in the kernel holds a lock, on which the next nvidia-smi would
# hang, too. Start times in /proc/PID/stat count hundredths of a second (USER_HZ of all Linux ports with
# such GPUs). A step of Slurm's can open only the GPUs that it was given (cgroup.conf(5),
# ConstrainDevices): there, a GPU that nvidia-smi does not show is no fault.
# shellcheck disable=SC2086,SC2170 # one word per field; @STUCK_AFTER_S@ is a number
if [ ! -e /proc/driver/nvidia/version ] && [ ! -d /sys/module/nvidia ] &&
    [ ! -d /sys/bus/pci/drivers/nvidia ]; then
    printf 'nr_driver=none\n'
    exit 0
fi
while read -r nr_line; do
    case $nr_line in *slurm*) nr_step=1 ;; esac
done 2>/dev/null </proc/self/cgroup
if [ -n "${nr_step-}" ]; then
    nr_hidden=0
    for nr_file in /dev/nvidia[0-9]*; do
        # Not every file can be opened: only the refusal of a permission counts.
        case $({ : <"$nr_file"; } 2>&1) in *ermi*) nr_hidden=$((nr_hidden + 1)) ;; esac
    done
    if [ "$nr_hidden" -gt 0 ]; then
        printf 'nr_hidden=%s\n' "$nr_hidden"
        exit 0
    fi
fi
nr_up=0
{ read -r nr_up nr_x </proc/uptime; } 2>/dev/null
nr_found=$(grep -lsxF -e nvidia-smi -e @FABRIC_MANAGER@ /proc/[0-9]*/comm)
# Above that the shell could not start it: too many processes for one command line.
if [ $? -lt 126 ]; then printf 'nr_scanned=1\n'; fi
for nr_file in $nr_found; do
    nr_stat=
    { IFS= read -r nr_stat <"${nr_file%comm}stat"; } 2>/dev/null || continue
    nr_pid=${nr_file#/proc/}
    nr_pid=${nr_pid%/comm}
    # Any user can give a process these names, and have it wait in state D.
    nr_is_roots "${nr_file%/comm}" || continue
    case $nr_stat in
    *'(@FABRIC_MANAGER@)'*) printf 'nr_fabric_manager=%s\n' "$nr_pid" ;;
    *'(nvidia-smi) D '*)
        set -- ${nr_stat##*) }
        nr_age=$((${nr_up%%.*} - ${20} / 100))
        if [ "$nr_age" -gt @STUCK_AFTER_S@ ]; then
            printf 'nr_stuck=%s %s\n' "$nr_pid" "$nr_age"
            exit 0
        fi
        ;;
    esac
done
nr_answer nvidia-smi @COMMAND@
