# The lines about a node's own name and host keys.
nr_host=
{ IFS= read -r nr_host </proc/sys/kernel/hostname; } 2>/dev/null
case $nr_host in
*[!A-Za-z0-9_-]*) nr_full=1 ;;
*) nr_full= && nr_seek "^[^#]*[[:space:]]$nr_host([[:space:]#]|$)" /etc/hosts ;;
esac
nr_seek '^[[:space:]]*hostkey[[:space:]=]' /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf
nr_seek '^(ssh|ecdsa)-' /etc/ssh/ssh_host_*_key.pub
