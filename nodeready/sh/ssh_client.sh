# A node's names and host keys, the files of ssh, and what ssh says about its options.
#
# The keys are those that sshd offers: the usual files, and those that its configuration names. The full
# name comes from /etc/hosts, else from DNS. The addresses come from nodeready.subjects.nics.nic: `ip`
# can wait for the kernel's network lock for ever.
# shellcheck disable=SC2170 # @SENT_BYTES@ is a number
nr_find ssh_client '/etc/hosts:*' '/etc/ssh/ssh*'
printf 'host=%s\n%s\n' "$nr_host" "$nr_found"
set -f
for nr_file in $nr_found; do
    case $nr_file in
    /etc/ssh/ssh_host_*_key | *:*) ;;
    /*) nr_value key "$nr_file.pub" ;;
    esac
done
set +f
case $nr_found in */etc/hosts:*) nr_full=1 ;; esac
if [ -z "$nr_full" ] && command -v hostname >/dev/null; then
    nr_say fqdn "$(timeout 1 hostname -f 2>/dev/null)"
fi

nr_own=
for nr_file in ~root/.ssh/config "$HOME/.ssh/config"; do
    if [ -s "$nr_file" ]; then nr_own=$nr_file; fi
done
@CONF@
nr_size=0
if nr_seen_at @KNOWN_HOSTS@; then :
elif [ -s @KNOWN_HOSTS@ ]; then nr_size=$(wc -c <@KNOWN_HOSTS@); fi
printf 'size=%s\n' "$nr_size"
if [ "$nr_size" -gt @SENT_BYTES@ ]; then
    printf 'digest=%s\n' "$(sed -n '/^@BEGIN@$/,/^@END@$/p' @KNOWN_HOSTS@ | sha256sum)"
fi
if command -v ssh >/dev/null; then
    printf 'have=ssh\n'
    @EFFECTIVE@
else
    for nr_file in /var/lib/dpkg/info/openssh-client.md5sums /var/lib/dpkg/info/openssh-client:*.md5sums; do
        if [ -e "$nr_file" ]; then printf 'package=openssh-client\n'; fi
    done
    if command -v rpm >/dev/null && rpm -q openssh-clients >/dev/null 2>&1; then
        printf 'package=openssh-clients\n'
    fi
fi
if [ "$nr_size" -le @SENT_BYTES@ ]; then
    nr_exact @KNOWN_HOSTS@
else
    printf '\n@%s file %s\n' "$NR" @KNOWN_HOSTS@
    sed '/^@BEGIN@$/,/^@END@$/d' @KNOWN_HOSTS@ | head -c @SENT_BYTES@ | base64
    printf '\n@%s eof\n' "$NR"
fi
nr_exact @MAIN@ @VENDOR@ @DROPIN@
:
