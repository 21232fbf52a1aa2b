# How pdsh reaches other nodes: the program, its module, and the start-up files of shells.
nr_have pdsh
if [ -e /etc/debian_version ] || [ -d /etc/pdsh ]; then printf 'debian=1\n'; fi
for nr_file in /etc/csh.* @PROFILE_D@/*.csh; do
    if [ -e "$nr_file" ]; then printf 'csh=1\n'; break; fi
done
for nr_file in /usr/lib/pdsh/sshcmd.so /usr/lib64/pdsh/sshcmd.so /usr/lib/*-linux-*/pdsh/sshcmd.so \
    /usr/local/lib/pdsh/sshcmd.so /usr/local/lib64/pdsh/sshcmd.so; do
    if [ -e "$nr_file" ]; then printf 'module=%s\n' "$nr_file"; fi
done
nr_exact @RCMD_DEFAULT@ @ENVIRONMENT@
nr_find pdsh @FOUND@
printf '%s' "$nr_found"
