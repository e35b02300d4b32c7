{{/* What follows from a component's drainSeconds: the gateway goes on serving for `preStop` seconds, until nobody sends
it anything new; then requests have `drain` seconds; then there is some time left to end. */}}
{{- define "ropeway.preStopSeconds" -}}10{{- end -}}
{{- define "ropeway.slackSeconds" -}}30{{- end -}}

{{- define "ropeway.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The same for every pod. (dict "root" $ "component" c "values" component's ["pool" key]) */}}
{{- define "ropeway.podSpec" -}}
serviceAccountName: {{ include "ropeway.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologyKeys }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "ropeway.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "ropeway.podMetadata" -}}
labels:
  {{- include "ropeway.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: ropeway
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables of every process. */}}
{{- define "ropeway.env" -}}
- name: ROPEWAY_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ include "ropeway.redisSecret" . }}, key: redis-url}
- {name: ROPEWAY_LOG_LEVEL, value: {{ .Values.logLevel | quote }}}
- {name: ROPEWAY_LOG_JSON, value: "true"}
- {name: HOME, value: /tmp}
- {name: TMPDIR, value: /tmp}
{{- if .Values.tracing.endpoint }}
- {name: ROPEWAY_OTLP_TRACES_ENDPOINT, value: {{ .Values.tracing.endpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .Values.tracing.ratio | quote }}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: {{ printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME)" .Release.Namespace | quote }}}
{{- end }}
{{- if .Values.adapterStore.url }}
- {name: ROPEWAY_ADAPTER_STORE, value: {{ .Values.adapterStore.url | quote }}}
{{- else if .Values.adapterStore.existingClaim }}
- {name: ROPEWAY_ADAPTER_STORE, value: {{ .Values.adapterStore.mountPath | quote }}}
{{- end }}
{{- end -}}

{{/* Settings by name, as variables. Lists and maps are JSON, as the process reads them. */}}
{{- define "ropeway.settings" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- {name: {{ printf "ROPEWAY_%s" (upper $name) }}, value: {{ (kindIs "string" $value | ternary $value (toJson $value)) | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* All caches, from where they are mounted. (mount path) */}}
{{- define "ropeway.cacheEnv" -}}
- {name: XDG_CACHE_HOME, value: {{ . | quote }}}
- {name: HF_HOME, value: {{ printf "%s/huggingface" . | quote }}}
- {name: TRITON_CACHE_DIR, value: {{ printf "%s/triton" . | quote }}}
- {name: TORCHINDUCTOR_CACHE_DIR, value: {{ printf "%s/inductor" . | quote }}}
- {name: CUDA_CACHE_PATH, value: {{ printf "%s/cuda" . | quote }}}
{{- end -}}

{{- define "ropeway.adapterVolume" -}}
{{- if and .Values.adapterStore.existingClaim (not .Values.adapterStore.url) }}
- name: adapters
  persistentVolumeClaim: {claimName: {{ .Values.adapterStore.existingClaim }}}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "readOnly" bool) */}}
{{- define "ropeway.adapterMount" -}}
{{- if and .root.Values.adapterStore.existingClaim (not .root.Values.adapterStore.url) }}
- {name: adapters, mountPath: {{ .root.Values.adapterStore.mountPath }}, readOnly: {{ .readOnly }}}
{{- end }}
{{- end -}}

{{/* Where webhooks may go: gateways check it at the submit, tasks at each try. */}}
{{- define "ropeway.webhookEnv" -}}
- {name: ROPEWAY_WEBHOOK_ALLOW, value: {{ .Values.webhooks.allow | toJson | quote }}}
- {name: ROPEWAY_WEBHOOK_HTTP, value: {{ .Values.webhooks.http | quote }}}
{{- end -}}

{{/* Where background tasks wait, if that is another Redis. */}}
{{- define "ropeway.tasksRedis" -}}
- name: ROPEWAY_TASKS_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ include "ropeway.redisSecret" . }}, key: tasks-redis-url, optional: true}
{{- end -}}
