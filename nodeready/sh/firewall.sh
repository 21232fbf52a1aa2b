# The rules of the packet filter, where the kernel can have some: the probe loads no module. nf_tables
# is a loaded module, or built into the kernel: then there is no module file. /proc has the names of
# legacy tables.
#
# awk reads the listings of nft and of iptables-save. It prints the first drop or reject, and the
# rules with a verdict in which a number or a range is a port from @FIRST@ to @LAST@, at most @RULES@.
# Rules of the forward hook, of ARP and of bridges do not concern a job, and a job's packets need more
# than an accept on the way out. Text in quotes is a log's prefix or a comment.
nr_self
nr_nft=1
if [ ! -d /sys/module/nf_tables ]; then
    nr_release=
    { read -r nr_release </proc/sys/kernel/osrelease; } 2>/dev/null
    for nr_file in "/lib/modules/$nr_release/kernel/net/netfilter/nf_tables.ko"*; do
        if [ -e "$nr_file" ]; then nr_nft=; fi
    done
fi
nr_legacy=''
for nr_ip in ip ip6; do
    nr_file=/proc/net/${nr_ip}_tables_names
    if [ -r "$nr_file" ]; then
        if read -r nr_table <"$nr_file"; then nr_legacy="$nr_legacy $nr_ip"; fi
    elif [ -e "$nr_file" ]; then
        nr_legacy="$nr_legacy $nr_ip"
    fi
done
nr_listed() {
    printf '@%s list %s\n' "$NR" "$1"
    nr_answer "$@"
    printf '\n@%s status %s\n' "$NR" "$?"
}
case $nr_self_caps in
????????????[13579bdf]???) ;;
*)
    if [ -n "$nr_nft$nr_legacy" ]; then echo root=1; fi
    exit 0
    ;;
esac
nr_tables=
if [ -n "$nr_nft" ]; then nr_tables=$(nft -s list tables 2>&1); fi
# The mark is the run's nonce: every user of the node can read a command line.
if [ -n "$nr_tables$nr_legacy" ]; then
    {
        printf '@%s\n' "$NR"
        if [ -n "$nr_nft" ]; then nr_listed nft -s list ruleset; fi
        for nr_ip in $nr_legacy; do
            nr_save=${nr_ip}tables-legacy-save
            command -v "$nr_save" >/dev/null || nr_save=${nr_ip}tables-save
            nr_listed "$nr_save"
        done
    } | awk -v first=@FIRST@ -v last=@LAST@ '
mark == "" { mark = $1; next }
$1 == mark && $2 == "list" {
program = $3
family = program ~ /^ip6/ ? "ip6 " : "ip "
message = ""
next
}
$1 == mark {
if ($3 == 127) print "missing=" program
else if ($3) print "failed=" program ": " substr(message, 1, 160)
next
}
message == "" { message = $0 }
{ sub(/^[ \t]+/, "") }
/^table / { table = $2 " " $3; other = $2 == "arp" || $2 == "bridge"; next }
/^\*/ { table = family substr($0, 2); other = 0; next }
other { next }
/^(chain|map) / { chain = $2; hook = "" }
/^:/ { chain = substr($1, 2); hook = tolower(chain) }
/^-A / { chain = $2; hook = tolower(chain); sub(/^-A [^ ]+ /, "") }
/^type [a-z]+ hook / { hook = $4 }
chain ~ /^ufw-/ || chain == "INPUT_ZONES" || table ~ / firewalld$/ {
if (!manager) print "manager=" (manager = chain ~ /^ufw-/ ? "ufw" : "firewalld")
}
hook == "forward" { next }
/^:/ { $0 = "policy " tolower($2) ";" }
{
bare = $0
gsub(/"[^"]*"/, "", bare)
drops = bare ~ /(^| )(drop|reject)([ ;]|$)/ || bare ~ /(^| )-j (DROP|REJECT)( |$)/
accepts = hook != "output" && bare ~ / (accept|-j ACCEPT)( |$)/
if (!drops && !accepts) next
text = /^(type|policy) / ? "policy drop" : substr($0, 1, 400)
rule = table " " chain ": " text
if (drops && !dropped++) print "drop=" rule
if (bare !~ /ports? /) next
gsub(/[^0-9:-]+/, " ", bare)
count = split(bare, words, " ")
for (number = 1; number <= count; number++) {
    high = split(words[number], ends, /[-:]/) > 1 ? ends[2] : ends[1]
    if (ends[1] + 0 > last || high + 0 < first) continue
    if (rules++ < @RULES@) print "rule=" rule
    break
}
}
'
fi
