# Slurm's prolog has no PATH.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin:/opt/slurm/sbin
export PATH
python=
for name in {{ pythons }}; do
    if "$name" -I -S -c 'import sys; sys.exit(sys.version_info < {{ oldest }})' 2>/dev/null; then
        python=$name
        break
    fi
done
# What the last deploy compiled for a Python of this node, or else what has to compile itself: the
# one of which root has written the digest down, and nothing else.
program=
if [ -O {{ directory }} ] && [ -O {{ note }} ]; then
    read -r of made magic <{{ note }}
    for name in {{ compiled }} {{ bundle }}; do
        sum=$(sha256sum <"$name") || continue
        case " $of $made " in
        *" ${sum%% *} "*)
            program=$name
            break
            ;;
        esac
    done
fi 2>/dev/null
say() { logger -t nodeready -- "$*" 2>/dev/null || :; }
# The last line that the program said: why, when it went wrong.
last() { printf '%s' "${said##*
}"; }
