case "$*" in
*"-j 4711 "*) echo 'RUNNING|h100|gpu[001-002]' ;;
*"-j 12 "*) printf 'RUNNING|h100|gpu003\nRUNNING|all|gpu003\nPENDING|h100|\n' ;;
*"-j 13 "*) echo 'PENDING|h100|' ;;
*"-j 14 "*) ;;
*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
esac
