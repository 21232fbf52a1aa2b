# Without CAP_SYS_RESOURCE (in a container) root may not raise a hard limit above sshd's own. A strict
# pam_limits then refuses the login, so the probe reads the limits that root can set. The capability is
# bit 24, in the tenth digit of CapBnd.
nr_self
case $nr_self_bound in
?????????[02468ace]??????)
    nr_pid=1
    { read -r nr_pid </run/sshd.pid; } 2>/dev/null
    printf 'ceiling=%s\n' "$nr_pid"
    set -- "$@" "/proc/$nr_pid/limits"
    nr_find limits '/etc/pam.d/*' '/usr/lib/pam.d/*'
    printf '%s' "$nr_found"
    ;;
esac
