# The place of a crash's core: the kernel's pattern, the directory, what removes cores, the handlers.
# shellcheck disable=SC2043 # @REWRITERS@ are several
nr_value live /proc/sys/kernel/core_pattern
nr_self
if [ "$nr_self_uid" = 0 ]; then printf 'root=1\n'; fi
set --
nr_dir=@DIRECTORY@
# The owner of a link can change its target: a deploy follows no user's link (nr_walk).
nr_at=$nr_dir
while [ -n "${nr_at#/}" ]; do
    if [ -L "$nr_at" ] && nr_uid=$(stat -c %u "$nr_at" 2>/dev/null) && [ "$nr_uid" != 0 ]; then
        printf 'link=%s %s\n' "$nr_uid" "$nr_at"
    fi
    nr_at=${nr_at%/*}
done
# Users must be able to enter the directories on the way to a link, and to its target.
if [ -d "$nr_dir" ] && [ -L "$nr_dir" ]; then
    nr_at=$(cd -P "$nr_dir" 2>/dev/null && printf '%s' "$PWD")
    while [ -n "$nr_at" ]; do set -- "$@" "$nr_at"; nr_at=${nr_at%/*}; done
fi
nr_writable "$nr_dir" || :
nr_dir=$nr_at
while [ -n "${nr_dir#/}" ]; do set -- "$@" "$nr_dir"; nr_dir=${nr_dir%/*}; done
for nr_dir in "$@"; do
    shift
    if nr_seen_at "$nr_dir"; then
        printf 'way=%o %s %s\n' "$nr_mode" "$nr_uid" "$nr_dir"
    else
        set -- "$@" "$nr_dir"
    fi
done
if [ $# != 0 ]; then stat -Lc 'way=%a %u %n' "$@" 2>/dev/null; fi
if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
for nr_dir in /etc/systemd/system /usr/lib/systemd/system /lib/systemd/system; do
    for nr_unit in @REWRITERS@; do
        if [ -L "$nr_dir/$nr_unit" ] && [ ! "$nr_dir/$nr_unit" -ef /dev/null ]; then
            printf 'unit=%s\n' "$nr_unit"
        elif [ -L "$nr_dir/$nr_unit" ]; then
            printf 'masked=%s\n' "$nr_unit"
        elif [ -f "$nr_dir/$nr_unit" ]; then
            printf 'unit=%s\n' "$nr_unit"
        fi
        # systemctl mask refuses to replace a file in the place of its link.
        nr_unit=/etc/systemd/system/$nr_unit
        if [ "$nr_dir" = /etc/systemd/system ] && [ ! "$nr_unit" -ef /dev/null ]; then
            nr_there inplace "$nr_unit"
        fi
    done
done
nr_there file @COREDUMP@
for nr_file in /usr/lib/systemd/systemd-coredump /lib/systemd/systemd-coredump; do
    if [ -x "$nr_file" ]; then printf 'coredump=%s\n' "$nr_file"; fi
done
nr_find core_dumps @TMPFILES@
printf '%s' "$nr_found"
nr_lines set @COREDUMP@
