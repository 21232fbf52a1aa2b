# awk programs about the processes that no signal ends (state D) and the zombies, which the sections
# host and host_slow share.
# shellcheck disable=SC2016 # awk's variables

# A file of a process that has ended meanwhile is passed over. Of /proc/PID/stat it takes pid
# (name) state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime
# (proc_pid_stat(5)); the 37th is the CPU. A name cannot end a line (the kernel escapes it there),
# nor look like the fields behind it.
nr_fields='
function fields(pid,  line, n) {
    line = text = ""
    getline line < ("/proc/" pid "/stat")
    close("/proc/" pid "/stat")
    if (line !~ /\) [DZ] /) return 0
    text = line
    sub(/^.*\) /, "", line)
    text = substr(text, 1, length(text) - length(line))
    if (split(line, word, " ") < 37 || word[1] !~ /^[DZ]$/) return 0
    for (n = 1; n <= 13; n++) text = text (n == 1 ? "" : " ") word[n]
    return 1
}
function first(file, pattern,  line) {
    while ((getline line < file) > 0 && line !~ pattern) line = ""
    close(file)
    return line
}
'
# One awk reads all these files: a process for each kind of file would cost more than the reading. It
# prints the zombies by their parents, and the processes in state D. 2097152 is PF_KTHREAD of
# linux/sched.h. The user is the real uid (Uid: REAL EFFECTIVE ... of /proc/PID/status), because a
# user also starts a setuid program.
nr_states='
function keep(pid) {
    few++
    print "uid_" pid "=" uid[pid]
    print "cpu_" pid "=" cpu[pid]
    print stat[pid]
}
BEGIN {
    for (n = 1; n < ARGC; n++) {
        pid = ARGV[n]
        gsub(/[^0-9]/, "", pid)
        if (!fields(pid)) continue
        if (word[1] == "Z") { zombies++; of[word[2]]++; continue }
        if (int(word[7] / 2097152) % 2 == 1) continue
        last = word[37]
        if (waiting++ >= 16384) { unseen++; continue }
        if (split(first("/proc/" pid "/status", "^Uid:"), word, /[ \t]+/) < 3) continue
        seen++
        if (each[word[2]]++ >= @MOST_OF_USER@) continue
        uid[pid] = word[2]
        cpu[pid] = last
        stat[pid] = text
        if (word[2] >= @FIRST_USER@) later[++many] = pid
        else if (few < @MOST_PROCESSES@) keep(pid)
    }
    for (n = 1; n <= many && few < @MOST_PROCESSES@; n++) keep(later[n])
    if (seen > few) print "more=" seen - few
    print "zombies=" zombies + 0
    print "unseen=" unseen + 0
    for (n = 0; n < 5; n++) {
        worst = ""
        for (parent in of) if (worst == "" || of[parent] > of[worst]) worst = parent
        if (worst == "") break
        print "reaps_" worst "=" of[worst]
        delete of[worst]
        name = first("/proc/" worst "/comm", "")
        if (name != "") print "parent_" worst "=" name
    }
}
'
