# The processes that no signal ends (state D), and zombies.
#
# A process passes through state D with every read of a disk. So the states are read twice, a
# second apart: a process is stuck that is in D both times and has used no CPU time in between. The
# time of waiting follows from ``se.exec_start`` of /proc/PID/sched, the time at which the process
# last ran, and from the same value of a process that runs now; the kernel keeps no other record.
# Each CPU has a separate clock for it, which stands still while the CPU serves interrupts or the
# hypervisor takes it (rq_clock_task of kernel/sched/sched.h): clocks may differ by hours. So the
# running process is started on the CPU on which the stuck process ran last. Without that file or
# taskset(1) the duration is not known.
#
# Only the first thread of a process is read: thousands of threads would cost more than the whole
# probe. Kernel threads normally wait in D and are left out. A process that a cgroup (v1) has
# frozen is in D too: Slurm's suspended jobs are.
#
# Any user can start thousands of processes in these states. So the node counts zombies and sends
# none, and reads a limited number of processes of each user. Of a process of another user it reads
# no file that waits for a lock of the process (cmdline, environ, stack).
#
# It sets nr_hung: the mounts at which an earlier probe hangs, a line each. An earlier section of the
# same shell may have read the states once, into nr_sorted (mount_table.sh).
# shellcheck disable=SC2016,SC2086 # awk's variables; one word per process

# The same processes once more. ARGV: their users, in one word, and their pids.
nr_again_states='
BEGIN {
    for (n = 2; n < ARGC; n++) if (fields(ARGV[n])) print text
    while ((getline line < "/etc/passwd") > 0) {
        split(line, word, ":")
        if (index(ARGV[1], " " word[3] " ")) print "user_" word[3] "=" word[1]
    }
    for (n = 2; n < ARGC; n++) {
        print "/proc/" ARGV[n] "/wchan:" first("/proc/" ARGV[n] "/wchan", "")
        print "/proc/" ARGV[n] "/sched:" first("/proc/" ARGV[n] "/sched", "^se.exec_start *:")
    }
}
'
# mawk fails when a process ends between the opening and the reading of its file (ESRCH). Then awk
# starts again, and a probe that never succeeds reports it.
nr_hung=
nr_failed=
nr_pids=
nr_ours=
nr_uids=' '
nr_cpus=' '
nr_self
nr_sort() { nr_sorted=$(awk "$nr_fields$nr_states" /proc/[0-9]*/stat 2>/dev/null); }
if [ -z "${nr_sorted:-}" ]; then nr_sort || nr_sort || nr_sort || nr_failed=1; fi
printf 'processes=1\n%s\n' "$nr_sorted"
while IFS='_=' read -r nr_key nr_pid nr_id; do
    case $nr_key in
    uid)
        nr_pids="$nr_pids $nr_pid"
        nr_uids="$nr_uids$nr_id "
        if [ "$nr_id" = "$nr_self_uid" ]; then nr_ours="$nr_ours $nr_pid"; fi
        ;;
    cpu) case $nr_cpus in *" $nr_id "*) ;; *) nr_cpus="$nr_cpus$nr_id " ;; esac ;;
    esac
done <<EOF
$nr_sorted
EOF
if [ -n "$nr_pids" ]; then
    sleep 1
    printf 'processes=2\n'
    nr_again() { nr_found=$(awk "$nr_fields$nr_again_states" "$nr_uids" $nr_pids 2>/dev/null); }
    nr_again || nr_again || nr_again || nr_failed=1
    printf '%s\n' "$nr_found"
    for nr_cpu in $nr_cpus; do
        taskset -c "$nr_cpu" sed -n "s/^se\.exec_start *:/clock_$nr_cpu:/p" /proc/self/sched
    done 2>/dev/null
    # Another user may give a process any name and any arguments, also one that is setuid root,
    # whose directory in /proc is root's. So only the real uid counts.
    for nr_pid in $nr_ours; do
        nr_line=
        { read -r nr_line <"/proc/$nr_pid/comm"; } 2>/dev/null
        if [ "$nr_line" = stat ]; then
            nr_line=$(tr '\0' ' ' <"/proc/$nr_pid/cmdline" 2>/dev/null)
            case $nr_line in
            *'@MARK@'*' %n '*)
                nr_line=${nr_line##*' %n '}
                nr_hung="$nr_hung${nr_line% }
"
                printf 'ours=%s\n' "$nr_pid"
                ;;
            esac
        fi
    done
fi
# Without awk, or with more arguments than the kernel takes, nothing was read.
if [ -z "$nr_failed" ]; then printf 'processes=end\n'; fi
