# The sockets of a node: all that listen, and those that hold a port from @FIRST@ to @LAST@; then the
# files @SETTINGS@. It starts two programs, a third for a long table, and some more when a port is
# held.
# shellcheck disable=SC2086,SC2170 # one word per field; @FIRST@ is a number
# nr_sockets KIND TABLE: the sockets of a short table, into nr_found.
nr_sockets() {
    if [ -z "$2" ]; then return; fi
    nr_kind=$1
    nr_found="${nr_found}read=$nr_kind
"
    IFS='
'
    for nr_line in $2; do
        unset IFS
        set -- $nr_line
        case $2 in *:????) nr_port=$((0x${2##*:})) ;; *) continue ;; esac
        case $4 in 06) continue ;; 0A) nr_name=socket ;; *) nr_name= ;; esac
        if [ "$nr_port" -ge @FIRST@ ] && [ "$nr_port" -le @LAST@ ]; then nr_name=held; fi
        if [ -z "$nr_name" ]; then continue; fi
        nr_found="$nr_found$nr_name=$nr_kind $2 $3 $4 $8 ${10}
"
    done
    unset IFS
}
# For each table the kernel visits all of its hash buckets, 2 ms and more, and again for the read
# that finds the end of the file. One read returns the complete lines that fit into a page
# (fs/seq_file.c, seq_read_iter; net/ipv4/tcp_ipv4.c, tcp_seq_start). A table that leaves room for
# one more line in the smallest page is complete, and the shell takes it apart: a process costs
# more. A longer table is read to its end, by awk. Ports are four hexadecimal digits, so that texts
# compare as numbers do. The line of a socket ends with the inode by which the socket's process is
# found.
nr_found=
nr_tcp=$(dd bs=4096 count=1 2>/dev/null </proc/net/tcp)
nr_tcp6=$(dd bs=4096 count=1 2>/dev/null </proc/net/tcp6)
if [ ${#nr_tcp} -lt 3584 ] && [ ${#nr_tcp6} -lt 3584 ]; then
    nr_sockets tcp "$nr_tcp"
    nr_sockets tcp6 "$nr_tcp6"
else
    nr_found=$(awk -v first=@FIRST_HEX@ -v last=@LAST_HEX@ '
FNR == 1 { kind = FILENAME; sub(/.*\//, "", kind); print "read=" kind; next }
{
port = substr($2, length($2) - 3) ""
inside = port >= first "" && port <= last ""
if (!inside && $4 != "0A" || $4 == "06") next
name = inside ? "held" : "socket"
if (count[name]++ < @MOST@) print name "=" kind " " $2 " " $3 " " $4 " " $8 " " $10
}
END {
if (count["held"] > @MOST@ || count["socket"] > @MOST@)
    print "more=" count["held"] + count["socket"]
}
' \
        /proc/net/tcp ${nr_tcp6:+/proc/net/tcp6})
fi
printf '%s\n' "$nr_found"
# Only when a port of the range is held: the process of the socket. Unlike cmdline, /proc/PID/fd and
# comm cannot hang. A process that has ended is skipped.
case $nr_found in
*held=*)
    set -- -false
    nr_uids=' '
    while read -r nr_kind nr_local nr_remote nr_state nr_uid nr_inode; do
        case $nr_kind in
        held=*)
            if [ "$nr_inode" = 0 ] || [ $# -gt 128 ]; then continue; fi
            set -- "$@" -o -lname "socket:\\[$nr_inode\\]"
            nr_uids="$nr_uids$nr_uid "
            ;;
        esac
    done <<NR_HELD
$nr_found
NR_HELD
    if find / -maxdepth 0 -lname x -printf '' 2>/dev/null; then
        # Any user can open a million files: after 3 s the holder stays unnamed.
        nr_links=$(timeout -k 1 3 \
            find /proc/[0-9]*/fd -maxdepth 1 \( "$@" \) -printf '%h %l\n' 2>/dev/null)
    else
        nr_links=$(timeout -k 1 3 ls -ln /proc/[0-9]*/fd 2>/dev/null |
            awk '/^\/proc/ { sub(/:$/, ""); name = $1 } /socket:/ { print name " " $NF }')
    fi
    while read -r nr_path nr_link; do
        nr_inode=${nr_link#*\[}
        nr_inode=${nr_inode%]}
        case $nr_found in
        *"held="*" ${nr_inode:-none}"*) ;;
        *) continue ;;
        esac
        nr_pid=${nr_path#/proc/}
        nr_pid=${nr_pid%%/*}
        nr_comm=
        { read -r nr_comm <"/proc/$nr_pid/comm"; } 2>/dev/null || continue
        nr_job=
        while read -r nr_group; do
            # A user can name cgroups, too, below those of systemd's logins.
            case $nr_group in
            */user.slice* | */user@*) ;;
            */uid_[0-9]*/job_[0-9]* | *slurmstepd.scope/job_[0-9]*) nr_job=${nr_group##*/job_} ;;
            esac
        done 2>/dev/null <"/proc/$nr_pid/cgroup"
        printf 'owner=%s %s %s %s\n' "$nr_inode" "$nr_pid" "${nr_job%%/*}:" "$nr_comm"
    done <<NR_LINKS
$nr_links
NR_LINKS
    awk -F: -v uids="$nr_uids" 'index(uids, " " $3 " ") { print "user=" $3 " " $1 }' /etc/passwd
;;
esac
nr_lines all @SETTINGS@
